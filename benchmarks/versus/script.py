"""A training script that autovram tunes: knobs from the environment, a metric on standard output.

python -m benchmarks.versus.script WORKLOAD PLACE BUDGET_BYTES SEED
"""

from __future__ import annotations

import os
import sys

import torch

from benchmarks.versus.task import Task

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STEPS = 3


def main() -> None:
    """Train some steps and print how fast."""
    torch.set_flush_denormal(True)  # as in the processes of all tools
    workload, place, budget, seed = sys.argv[1:]
    precision = NAMES[os.environ["AUTOVRAM_PRECISION"]]
    if precision == "float16" and place == "cpu":
        raise SystemExit("float16 is not worth a try on a processor")
    task = Task(workload, place, int(budget), precision, seed=int(seed))
    memory = task.bounded()
    size = int(os.environ["AUTOVRAM_BATCH_SIZE"])
    task.train(size, STEPS)
    with memory.unobserved():
        print(f"AUTOVRAM_METRIC it_per_s={size / min(task.train(size, STEPS))}")


if __name__ == "__main__":
    main()
