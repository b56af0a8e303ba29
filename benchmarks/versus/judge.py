"""Does an answer train? Judged in processes of its own, by what any user could read.

    python -m benchmarks.versus.judge survive TASK.json ANSWER.json STEPS   under the budget
    python -m benchmarks.versus.judge speed TASK.json ANSWER.json STEPS     without one, timed
    python -m benchmarks.versus.judge largest TASK.json                     that fits, bisected
    python -m benchmarks.versus.judge grid TASK.json LARGEST STEPS            each size, timed

prints a line of JSON. Nothing here asks autofit what it measured; of its report, only the plan is
applied, as its user would.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import autofit
from benchmarks.versus.peers import Answer, ran
from benchmarks.versus.task import Task

WARM_UP_STEPS = 3
MOST = 2**14
"""No micro-batch is looked for beyond this."""
FINENESS = 64
"""The largest is bisected to this share of itself."""


def trained(task: Task, answer: Answer, steps: int) -> tuple[list[float], int]:
    """Train by an answer; return the seconds of each optimizer step, and its samples."""
    accumulation = answer.accumulation_steps or 1
    samples = answer.micro_batch * accumulation
    if answer.report is None:
        own = task.with_precision(answer.precision)
        return own.train(answer.micro_batch, steps, accumulation), samples
    report = autofit.load(answer.report)
    samples = report.best.plan.samples_per_step
    model = task.build_on_device()
    seconds, batch = [], task.batch(samples)
    with report.apply(model, task.optimizer(model), loss_fn=task.loss) as training:
        for _ in range(steps):
            began = time.perf_counter()
            training.step(batch)
            if task.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    return seconds, samples


def survive(task: Task, answer: Answer, steps: int) -> dict[str, Any]:
    """Train under the budget; return what it held and whether it lived."""
    memory = task.bounded()
    try:
        trained(task, answer, steps)
    except Exception as error:  # a size of zero raises what it raises
        return {"survives": False, "died_of": f"{type(error).__name__}: {error}"[:200]}
    return {"survives": True, "peak_bytes": memory.peak_bytes}


def speed(task: Task, answer: Answer, steps: int) -> dict[str, Any]:
    """Return samples per second of each timed step."""
    seconds, samples = trained(task, answer, WARM_UP_STEPS + steps)
    return {"samples_per_second": [samples / each for each in seconds[WARM_UP_STEPS:]]}


def largest(task: Task) -> int:
    """Return the largest micro-batch that trains for some steps; 0: none does."""
    memory = task.bounded()

    def fits(size: int) -> bool:
        runs = ran(task, size)
        gc.collect()
        memory.release()
        return runs

    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // FINENESS):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def grid(task: Task, most: int, steps: int) -> dict[int, float]:
    """Return samples per second by micro-batch: powers of two, and the largest that fits."""
    sizes = [size for size in (2**k for k in range(15)) if size < most] + [most]
    return {
        size: size / statistics.median(task.train(size, WARM_UP_STEPS + steps)[WARM_UP_STEPS:])
        for size in sizes
    }


def main() -> None:
    """Judge, and print."""
    how, task_file, *rest = sys.argv[1:]
    task = Task(**json.loads(Path(task_file).read_text()))
    judges: Mapping[str, Callable[[Task, Answer, int], dict[str, Any]]] = {
        "survive": survive,
        "speed": speed,
    }
    found: Any
    if how == "largest":
        found = {"largest": largest(task), "global_batch": task.global_batch}
    elif how == "grid":
        found = grid(task, int(rest[0]), int(rest[1]))
    else:
        found = judges[how](task, Answer(**json.loads(Path(rest[0]).read_text())), int(rest[1]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
