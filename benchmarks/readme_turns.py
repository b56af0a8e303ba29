"""The README's search, and its answer in turns beside what a finder answers.

    python -m benchmarks.readme_turns --json FILE --text FILE        (about two minutes)

Runs the README's command in a process of its own, whose output goes into `--text`. Then its answer
and the largest power of two that trains in float32 with default settings train in turns, in pairs
of processes. Both files are what the README's numbers are taken from
(`benchmarks/stated_numbers/search.md`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import autofit
from autofit.report.summary import describe
from autofit.units import parse_bytes
from benchmarks.versus.bench import Bench
from benchmarks.versus.peers import Answer

WORKLOAD, BUDGET, PAIRS = "small_cnn", "64MiB", 3
ASKED = (
    *("--device", "cpu", "--vram-budget", BUDGET),
    *("--planned-steps", "1000", "--out", "report.json"),
)
COMMAND = ("autofit", "search", f"benchmarks/workloads.py:{WORKLOAD}", *ASKED)


def finder_answer(at: Bench, global_batch: int) -> Answer:
    """Return the largest power of two that trains in float32, accumulated to the global batch."""
    size = global_batch
    while size > 1 and not at.verdict(asdict(Answer(size, "float32")))["survives"]:
        size //= 2
    return Answer(size, "float32").keeping(global_batch)


def main() -> None:
    """Search, let the answers train in turns, and write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="what the command printed")
    given = parser.parse_args()
    task = {"workload": WORKLOAD, "place": "cpu", "budget_bytes": parse_bytes(BUDGET), "seed": 0}
    with tempfile.TemporaryDirectory() as name:
        at, report = Bench(task, Path(name), steps=20), Path(name) / "report.json"
        command = [
            str(Path(sys.executable).with_name("autofit")),
            "search",
            str(Path(COMMAND[2]).resolve()),
        ]
        ran = subprocess.run(
            [*command, *ASKED], cwd=name, stdout=subprocess.PIPE, text=True, check=True
        )
        given.text.write_text(f"$ {' '.join(COMMAND)}\n{ran.stdout}")
        found = autofit.load(report)
        ours = Answer(found.plan.micro_batch, "float32", report=str(report))
        finder = finder_answer(at, found.plan.samples_per_step)
        pairs = [at.pair(asdict(ours), asdict(finder)) for _ in range(PAIRS)]
    speeds = [round(statistics.median(its)) for its in zip(*pairs, strict=True)]
    plan = f"{finder.micro_batch} x {finder.accumulation_steps}"
    told = {
        "measured": f"{WORKLOAD} in {BUDGET}, in turns, medians of {PAIRS} pairs of processes",
        "finder": {"plan": plan, "samples_per_second": speeds[1]},
        "autofit": {
            "plan": describe(found.plan, found.record),
            "samples_per_second": speeds[0],
        },
        "pairs": pairs,
    }
    given.json.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
