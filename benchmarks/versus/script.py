"""A training script that autovram tunes: knobs from the environment, a metric on standard output.

python -m benchmarks.versus.script WORKLOAD PLACE BUDGET_BYTES SEED
"""

from __future__ import annotations

import os
import sys

from benchmarks.versus.place import compute_alike
from benchmarks.versus.task import Task

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STEPS = 3


def main() -> None:
    """Train some steps and print how fast."""
    workload, place, budget, seed = sys.argv[1:]
    precision = NAMES[os.environ["AUTOVRAM_PRECISION"]]
    if precision == "float16" and place == "cpu":
        raise SystemExit("float16 is not worth a try on a processor")
    task = Task(workload, place, int(budget), precision, seed=int(seed))
    compute_alike(place)
    speed = task.speed(int(os.environ["AUTOVRAM_BATCH_SIZE"]), STEPS)
    print(f"AUTOVRAM_METRIC it_per_s={speed}")


if __name__ == "__main__":
    main()
