"""Does an answer train? Judged in processes of its own, by what any user could read.

    python -m benchmarks.versus.judge survive TASK.json ANSWER.json STEPS   under the budget
    python -m benchmarks.versus.judge speed TASK.json ANSWER.json STEPS     without one, timed
                                                                            for each line it reads
prints a line of JSON. Nothing here asks autofit what it measured; of its report, only the plan is
applied, as its user would.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import autofit
from benchmarks.versus.peers import Answer
from benchmarks.versus.place import compute_alike
from benchmarks.versus.task import Task

WARM_UP_STEPS = 3
TURN_S = 0.5
"""Two processes that take turns of this length meet the same drift of the machine."""


def step_seconds_of(task: Task, answer: Answer) -> tuple[Iterator[float], int]:
    """Return the seconds of each optimizer step of an endless training, and a step's samples."""
    if answer.report is not None:
        report = autofit.load(answer.report)
        return _step_seconds_of_report(task, report), report.plan.samples_per_step
    own = replace(task, precision=answer.precision, levers=answer.levers)
    samples = answer.micro_batch * answer.accumulation_steps
    return own.step_seconds(answer.micro_batch, answer.accumulation_steps), samples


def _step_seconds_of_report(task: Task, report: autofit.Report) -> Iterator[float]:
    model = task.build_on_device()
    batch = task.batch(report.plan.samples_per_step)
    with report.apply(model, task.optimizer(model), loss_fn=task.loss) as training:
        while True:
            began = time.perf_counter()
            training.step(batch)
            if task.place == "cuda":
                torch.cuda.synchronize()
            yield time.perf_counter() - began


def survive(task: Task, answer: Answer, steps: int) -> dict[str, Any]:
    """Train under the budget; return what it held and whether it lived."""
    memory = task.bounded()
    try:
        deque(islice(step_seconds_of(task, answer)[0], steps), maxlen=0)
    except Exception as error:  # a size of zero raises what it raises
        return {"survives": False, "died_of": f"{type(error).__name__}: {error}"[:200]}
    return {"survives": True, "peak_bytes": memory.peak_bytes}


def speeds(task: Task, answer: Answer, steps: int) -> Iterator[float]:
    """Yield the median samples per second of so many steps, or of those of one turn."""
    seconds, samples = step_seconds_of(task, answer)
    deque(islice(seconds, WARM_UP_STEPS), maxlen=0)
    while True:
        turn: list[float] = []
        while len(turn) < steps and sum(turn) < TURN_S:
            turn.append(next(seconds))
        yield samples / statistics.median(turn)


def main() -> None:
    """Judge, and print."""
    how, task_file, answer_file, steps = sys.argv[1:]
    task = Task(**json.loads(Path(task_file).read_text()))
    answer = Answer(**json.loads(Path(answer_file).read_text()))
    compute_alike(task.place)
    if how == "survive":
        print(json.dumps(survive(task, answer, int(steps))))
        return
    told = sys.stdout
    with redirect_stdout(sys.stderr):  # which libraries may print to
        for _, speed in zip(sys.stdin, speeds(task, answer, int(steps)), strict=False):
            print(speed, file=told, flush=True)


if __name__ == "__main__":
    main()
