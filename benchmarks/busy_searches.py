"""Whether real searches beside busy loops answer rightly.

`python -m benchmarks.busy_searches search FOLDER` runs searches on the CPU, ten for each workload,
beside four processes that count without end, and keeps their reports. `... judge FOLDER`, on the
quiet machine afterwards, trains each plan that a search measured in a plain loop, in turns, and
prints where a report decided for a plan that is more than 5 % slower than another one that its
search measured. Prints Markdown. `--timeout S` ends each search after S seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import autofit
from autofit.measurement import Trial
from autofit.report.report import Report
from autofit.report.summary import one_line
from benchmarks import workloads

JOBS = ("tiny_gpt", "tiny_vit")
"""Workloads; the first is the README's job."""
BUDGET = "64MiB"
GLOBAL_BATCH = 32
MOST_LOST = 0.05
BUSY_LOOPS = 4
_TURN_S = 1.0
"""Seconds that a plan is trained at a time."""
_TURNS = 5
_FAR = 3.0
"""A plan that a search measured so many times slower than its fastest is not trained again."""
_CONTENDS = 1.3
"""A plan takes part in all turns where it took at most so many times the fastest in the first."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Let that many processes count without end."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def search(folder: Path, times: int, loops: int, timeout_s: float | None) -> None:
    """Run the searches and keep their reports, round by round."""
    folder.mkdir(parents=True, exist_ok=True)
    with busy_loops(loops):
        for number in range(times):
            for name in JOBS:
                print(f"{name} {number}: {_search(folder, name, number, timeout_s)}", flush=True)


def _search(folder: Path, name: str, number: int, timeout_s: float | None) -> str:
    """Run one search, keep its report, and return what is printed of it."""
    began = time.monotonic()
    try:
        report = autofit.search(
            _workload(name), device="cpu", vram_budget=BUDGET, timeout=timeout_s, progress=False
        )
    except autofit.SearchTimedOut as error:
        return f"no report: {error}"
    report.save(folder / f"{name}-{number}.json")
    return f"{time.monotonic() - began:.0f} s, {_first_line(report)}"


def judge(folder: Path) -> None:
    """Print each report's answer beside the fastest plan of its search."""
    print("| search | first line | probes | slower than the fastest measured |")
    print("|---|---|---|---|")
    wrong = decided = 0
    for name in JOBS:
        reports = [autofit.load(path) for path in sorted(folder.glob(f"{name}-*.json"))]
        seconds = _quiet_seconds(name, reports)
        for number, report in enumerate(reports):
            measured = {str(trial.plan): seconds[str(trial.plan)] for trial in _ran(report)}
            lost = seconds[str(report.best.plan)] / min(measured.values()) - 1
            said = _first_line(report)
            is_decided = report.record.search.is_decided
            decided += is_decided
            wrong += is_decided and lost > MOST_LOST
            probes = len(report.record.trials)
            print(f"| {name} {number} | {said} | {probes} | {lost:+.1%} |", flush=True)
    print(f"\n{wrong} wrong of {decided} decided")


def _quiet_seconds(name: str, reports: list[Report]) -> dict[str, float]:
    """Return the median seconds of a sample of each plan that any of the searches measured."""
    plans: dict[str, tuple[Report, Trial]] = {}
    for report in reports:
        plans |= {str(trial.plan): (report, trial) for trial in _ran(report)}
    first = {plan: _turn(name, *plans[plan]) for plan in plans}
    contend = [plan for plan in plans if first[plan] <= _CONTENDS * min(first.values())]
    turns = {plan: [seconds] for plan, seconds in first.items()}
    for _ in range(_TURNS):
        for plan in contend:
            turns[plan].append(_turn(name, *plans[plan]))
    return {plan: statistics.median(seconds) for plan, seconds in turns.items()}


def _turn(name: str, report: Report, trial: Trial) -> float:
    """Train a plan in a plain loop for a second; return the median seconds of a sample."""
    workload = _workload(name)
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    samples = trial.plan.samples_per_step
    batch = workload.batch(samples)
    chosen = Report(replace(report.record, best_number=trial.number), workload=workload)
    functions: dict[str, Any] = {"loss_fn": workload.loss_fn, "criterion": workload.criterion}
    times: list[float] = []
    with chosen.apply(model, optimizer, **functions) as training:
        training.step(batch)
        until = time.monotonic() + _TURN_S
        while time.monotonic() < until or len(times) < 3:  # a median
            began = time.perf_counter()
            training.step(batch)
            times.append(time.perf_counter() - began)
    return statistics.median(times) / samples


def _workload(name: str) -> autofit.Workload:
    made: autofit.Workload = getattr(workloads, name)()
    return replace(made, global_batch=GLOBAL_BATCH)


def _ran(report: Report) -> list[Trial]:
    """Return the trials that ran, without those that took much more than the fastest."""
    ran = [trial for trial in report.record.trials if trial.measurement.ok]
    most = max(trial.samples_per_second or 0.0 for trial in ran)
    return [
        trial
        for trial in ran
        if trial.plan == report.best.plan or (trial.samples_per_second or 0.0) > most / _FAR
    ]


def _first_line(report: Report) -> str:
    return one_line(report.record)[:100]


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["search", "judge"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--loops", type=int, default=BUSY_LOOPS)
    parser.add_argument("--timeout", type=float, help="seconds of a search")
    given = parser.parse_args()
    if given.command == "search":
        search(given.folder, given.times, given.loops, given.timeout)
    else:
        judge(given.folder)


if __name__ == "__main__":
    main()
