"""The default answer beside plans that a person writes by hand, on a processor.

    python -m benchmarks.by_hand --json RAW.jsonl           (about an hour, two quiet cores)
    python -m benchmarks.by_hand --json RAW.jsonl medium_cnn=256MiB --seeds 0

Three models in a budget under which all plans fit, and none at every size. `benchmarks.versus` runs
it: `autofit.search` is called as a user calls it, and a plain loop trains by six plans, each with
what helped before, at the largest micro-batch that fits rounded down to a multiple of eight.
"""

from __future__ import annotations

import sys

from benchmarks.versus.__main__ import main as versus
from benchmarks.versus.roster import COMPARED, EXPERT, OURS, PEERS

TASKS = ("medium_vit=256MiB", "medium_cnn=256MiB", "medium_gpt=256MiB")
STEPS_TO_LIVE = 3


def main() -> None:
    """Compare autofit with the plans by hand alone."""
    by_hand = [name for name in PEERS if name not in COMPARED or name in (OURS, EXPERT)]
    given = sys.argv[1:]
    tasks = [] if any("=" in word for word in given) else TASKS
    seeds = [] if "--seeds" in given else ["--seeds", "0", "1"]
    versus([*given, *tasks, *seeds, "--steps", str(STEPS_TO_LIVE), "--only", *by_hand])


if __name__ == "__main__":
    main()
