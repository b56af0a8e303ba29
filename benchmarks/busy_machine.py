"""How often the README's search beside busy loops decides, and whether what it decides is right.

    python -m benchmarks.busy_machine --json FILE --loops 1,2 --minutes 12

Runs the search beside loops that keep a core busy each, some times for each number of loops. Each
search has a timeout. Where nothing was decided, the best candidate is looked at. When the loops
have been stopped, each plan that came out is timed beside the baseline, in turns and in fresh
probes, the first time that it does: by that the decided direction is judged. Prints a line a search
and a Markdown table. Searches that the file has are not run again, so a run that `--minutes` cut
can be continued: ten seeds beside one and two loops take up to an hour with the default timeout.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import autofit
from autofit.measurement import Trial
from autofit.planning.constants import MAX_LOST
from autofit.report.report import Report
from autofit.report.summary import describe, next_best
from autofit.rounds import rounds_of
from benchmarks import workloads
from benchmarks.readme_turns import BUDGET

PLANNED_STEPS = 1000
TIMEOUT_S = 180.0
"""Of each search. Without one a search beside a loop may take many times as long as alone: where
two threads meet in a barrier in each operator, one waits until the loop lets the other run."""
_BUSY = "while True: pass"
_STEPS = 12  # that the judge times in a turn


@dataclass(frozen=True)
class Run:
    """A search and its judgement.

    Attributes:
        seed: of the search.
        loops: busy loops beside it.
        decided: whether the best plan was told from the baseline.
        why_not: the reason, where it was not.
        plan: the recommended plan.
        best: the plan that measured fastest, or the next best one where that is the baseline.
        claimed, low, high: the factor of `best` over the baseline by the search, and its interval.
        judged: the same factor on the idle machine.
        probes, rounds: of the search, and of its final comparison.
        seconds: of the search.
    """

    seed: int
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
    rounds: int
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the judge finds the recommended plan faster, or the baseline hardly slower."""
        is_faster, truth = self.plan == self.best, math.log(self.judged)
        return truth > 0 if is_faster else truth < MAX_LOST


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


def searched(seed: int, loops: int, timeout_s: float) -> Report:
    """Search beside the loops."""
    with busy_loops(loops):
        return autofit.search(
            workloads.small_cnn(),
            device="cpu",
            vram_budget=BUDGET,
            planned_steps=PLANNED_STEPS,
            timeout=timeout_s,
            seed=seed,
            progress=False,
        )


def speed(report: Report, trial: Trial) -> float:
    """Return the samples/s of a trial's plan, as the report has it, in a fresh probe."""
    record = replace(report.record, recommended_number=trial.number)
    found = autofit.soak(
        workloads.small_cnn(), plan=replace(report, record=record), steps=_STEPS, device="cpu"
    )
    return found.samples_per_second or math.nan


def judged(report: Report, trial: Trial, turns: int) -> float:
    """Return how many times as fast as the baseline a trial's plan is, by turns."""
    ratios = []
    for turn in range(turns):
        order = [trial, report.baseline][:: 1 if turn % 2 else -1]
        speeds = {each.number: speed(report, each) for each in order}
        ratios.append(speeds[trial.number] / speeds[report.baseline.number])
    return statistics.median(ratios)


def run(
    seed: int, loops: int, timeout_s: float, turns: int, known: Mapping[str, float]
) -> Run | None:
    """Search and judge; None: no other plan than the baseline ran.

    Args:
        seed, loops, timeout_s: of the search.
        turns: of the judge.
        known: what it found of plans that came out before.
    """
    report = searched(seed, loops, timeout_s)
    record = report.record
    beside = record.best if record.best.plan != report.baseline.plan else next_best(record)
    if beside is None:
        return None
    ahead, best = record.ahead(beside.plan, report.baseline.plan), describe(beside.plan, record)
    claimed, low, high = map(math.exp, (ahead.log, ahead.low, ahead.high))
    return Run(
        seed,
        loops,
        report.is_decided,
        record.search.undecided_because,
        describe(report.plan, record),
        best,
        claimed,
        low,
        high,
        known[best] if best in known else judged(report, beside, turns),
        record.search.probes,
        len(rounds_of(record.trials)),
        record.search.seconds,
    )


def rows_of(path: Path) -> list[Run]:
    """Return the runs that a file has."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Run(**json.loads(line)) for line in lines]


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the lines of a table by the number of loops."""
    yield "| busy loops | searches | decided | wrong | rounds | probes | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for loops in sorted({each.loops for each in runs}):
        own = [each for each in runs if each.loops == loops]
        decided = [each for each in own if each.decided]
        yield (
            f"| {loops} | {len(own)} | {len(decided)} "
            f"| {sum(not each.is_right for each in decided)} "
            f"| {statistics.mean(each.rounds for each in own):.1f} "
            f"| {statistics.mean(each.probes for each in own):.1f} "
            f"| {statistics.mean(each.seconds for each in own):.0f} |"
        )


def runs_of(asked: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs that the file has, and then further ones while there is time."""
    began, longest_s, runs = time.monotonic(), 0.0, rows_of(asked.json)
    yield from runs
    done = {(each.seed, each.loops) for each in runs}
    for seed in range(asked.seed, asked.seed + asked.runs):
        for loops in map(int, asked.loops.split(",")):
            run_began = time.monotonic()
            if (seed, loops) in done or run_began + longest_s > began + 60 * asked.minutes:
                continue
            known = {each.best: each.judged for each in runs}
            found = run(seed, loops, asked.timeout, asked.turns, known)
            longest_s = max(longest_s, time.monotonic() - run_began)
            if found is not None:
                runs.append(found)
                with asked.json.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="JSON lines")
    parser.add_argument("--runs", type=int, default=10, help="searches for each number of loops")
    parser.add_argument("--loops", default="0,1,2", help="busy loops, separated by commas")
    parser.add_argument("--turns", type=int, default=5, help="of the judge, for each plan")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="of each search, in seconds"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no run that may end later"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first search")
    runs = []
    for found in runs_of(parser.parse_args()):
        print(json.dumps(asdict(found)), flush=True)
        runs.append(found)
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
