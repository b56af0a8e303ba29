"""How often a search beside busy loops decides, and whether what it decides is right.

Runs a search of a real training on the CPU beside 0, 1 and 2 loops that keep a core busy, some
times each. When the loops have been stopped, the answer (or where nothing was decided, the best
candidate) and the baseline are timed in turns, each in fresh probes, by which the decided direction
is judged. Prints a line a search and a Markdown table.

    python -m benchmarks.busy_machine --runs 10         (an hour on an idle machine of two cores)
    python -m benchmarks.busy_machine --runs 1 --loops 1 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import autofit
from autofit.measurement import Trial
from autofit.planning.constants import MOST_LOST
from autofit.report.report import Report
from autofit.report.summary import describe, next_best
from benchmarks import workloads

BUDGET = "64MiB"
_BUSY = "while True: pass"


@dataclass(frozen=True)
class Run:
    """A search and its judgement.

    Attributes:
        loops: busy loops beside the search.
        decided: whether the best plan was told from the baseline.
        why_not: the reason, where it was not.
        plan: the recommended plan.
        best: the plan that measured fastest, or the next best one where that is the baseline.
        claimed, low, high: the factor of `best` over the baseline by the search, and its interval.
        judged: the same factor on the idle machine.
        probes: of the search.
        seconds: of the search.
    """

    loops: int
    decided: bool
    why_not: str | None
    plan: str
    best: str
    claimed: float
    low: float
    high: float
    judged: float
    probes: int
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the judge finds the recommended plan faster, or the baseline hardly slower."""
        is_faster, truth = self.plan == self.best, math.log(self.judged)
        return truth > 0 if is_faster else truth < MOST_LOST


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def searched(seed: int, loops: int) -> Report:
    """Search beside the loops."""
    with busy_loops(loops):
        return autofit.search(
            workloads.small_cnn(), device="cpu", vram_budget=BUDGET, seed=seed, progress=False
        )


def speed(report: Report, trial: Trial, steps: int) -> float:
    """Return the samples/s of a trial's plan, as the report has it, in a fresh probe."""
    record = replace(report.record, recommended_number=trial.number)
    found = autofit.probe(
        workloads.small_cnn(), plan=replace(report, record=record), steps=steps, device="cpu"
    )
    return found.samples_per_second or math.nan


def judged(report: Report, trial: Trial, rounds: int, steps: int = 12) -> float:
    """Return how many times as fast as the baseline a trial's plan is, by turns."""
    ratios = []
    for turn in range(rounds):
        order = [trial, report.baseline][:: 1 if turn % 2 else -1]
        speeds = {each.number: speed(report, each, steps) for each in order}
        ratios.append(speeds[trial.number] / speeds[report.baseline.number])
    return statistics.median(ratios)


def run(seed: int, loops: int, rounds: int) -> Run | None:
    """Search and judge; None: no other plan than the baseline ran."""
    report = searched(seed, loops)
    record = report.record
    beside = record.best if record.best.plan != report.baseline.plan else next_best(record)
    if beside is None:
        return None
    ahead = record.ahead(beside.plan, report.baseline.plan)
    claimed, low, high = map(math.exp, (ahead.log, ahead.low, ahead.high))
    return Run(
        loops,
        report.is_decided,
        record.search.undecided_because,
        describe(report.plan, record),
        describe(beside.plan, record),
        claimed,
        low,
        high,
        judged(report, beside, rounds),
        record.search.probes,
        record.search.seconds,
    )


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the lines of a table by the number of loops."""
    yield "| busy loops | searches | decided | right where decided | probes | seconds |"
    yield "|---|---|---|---|---|---|"
    for loops in sorted({each.loops for each in runs}):
        own = [each for each in runs if each.loops == loops]
        decided = [each for each in own if each.decided]
        yield (
            f"| {loops} | {len(own)} | {len(decided)} | {sum(each.is_right for each in decided)} "
            f"| {statistics.mean(each.probes for each in own):.1f} "
            f"| {statistics.mean(each.seconds for each in own):.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10, help="searches for each number of loops")
    parser.add_argument("--loops", default="0,1,2", help="busy loops, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the judge")
    parser.add_argument("--seed", type=int, default=0, help="of the first search")
    asked = parser.parse_args()
    runs = []
    for seed in range(asked.seed, asked.seed + asked.runs):
        for loops in map(int, asked.loops.split(",")):
            found = run(seed, loops, asked.rounds)
            print(json.dumps(None if found is None else asdict(found)), flush=True)
            runs += [] if found is None else [found]
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
