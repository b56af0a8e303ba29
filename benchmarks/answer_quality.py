"""How good a search's answer is where speed is irregular and measurements are noisy.

Prints Markdown: searches on `benchmarks.irregular_devices`, by noise between probes, and on the
recorded grids of `benchmarks.grids`. "Regret" is 1 - the true speed of the answer over that of the
best plan of the whole space. "Passed over" counts answers slower than another plan that the same
search measured, beyond the 95 % interval that the noise of the device gives their measurements.

    python -m benchmarks.answer_quality --devices 1000 --scores scores.jsonl    (half an hour)

Seeds from 50 000; nothing was tuned on them. With `--scores` each search is written down as it
ends, and those that the file has are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import optuna

from autofit.measurement import Trial, probes_of
from autofit.plan import NoFeasiblePlan, Plan
from autofit.searching.engine import run_search
from benchmarks.grids.recorded import WORKLOADS, grid_world
from benchmarks.irregular_devices import draw_irregular_device

FIRST_SEED = 50_000
NOISES = (0.002, 0.005, 0.02, 0.05, 0.1, 0.2)
_SIGNIFICANT = 1.96


@dataclass(frozen=True)
class Score:
    """One search.

    Attributes:
        seed: of the device.
        noise: between probes.
        regret: 1 - speed of the answer / that of the best plan; 1 where nothing was found.
        passed_over: log by which a measured plan was faster than the answer, beyond the interval.
        probes, ooms: counts.
        is_decided: whether the search named its answer for sure.
    """

    seed: int
    noise: float
    regret: float
    passed_over: float
    probes: int
    ooms: int
    is_decided: bool = True


@dataclass(frozen=True)
class Job:
    """The search of one device; `cliffs` as for `draw_irregular_device`."""

    seed: int
    noise: float
    cliffs: str
    max_probes: int | None


def score(job: Job) -> Score:
    """Search one device."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    device = draw_irregular_device(job.seed, noise=job.noise, cliffs=job.cliffs)
    optimum = device.optimum()
    try:
        result = run_search(device.prober(), device.spec(), max_probes=job.max_probes)
    except NoFeasiblePlan:
        return Score(job.seed, job.noise, 0.0 if optimum == 0 else 1.0, 0.0, 0, 0)
    probes = probes_of(result.trials)
    return Score(
        job.seed,
        job.noise,
        1 - device.speed(result.best.plan) / optimum,
        passed_over(probes, result.best.plan, job.noise),
        len(probes),
        sum(not t.ok and t.measurement.outcome.about_memory for t in probes),
        result.is_decided,
    )


def passed_over(probes: Sequence[Trial], best: Plan, noise: float) -> float:
    """Return by how much, as a log, another plan was measured faster beyond their interval.

    A plan that did not fit when it was run again is no other answer.
    """
    logs: dict[Plan, list[float]] = defaultdict(list)
    failed = {trial.plan for trial in probes if not trial.ok}
    for trial in probes:
        if trial.plan not in failed and trial.samples_per_second:
            logs[trial.plan].append(math.log(trial.samples_per_second))
    answer = statistics.mean(logs[best])
    worst = 0.0
    for plan, its in logs.items():
        width = _SIGNIFICANT * noise * math.sqrt(1 / len(its) + 1 / len(logs[best]))
        ahead = statistics.mean(its) - answer - width
        if plan != best:
            worst = max(worst, ahead)
    return worst


def _row(name: str, scores: Sequence[Score]) -> str:
    regrets = sorted(score.regret for score in scores)
    cells = [
        name,
        str(len(scores)),
        f"{statistics.mean(regrets):.4f}",
        f"{regrets[int(0.9 * len(regrets))]:.4f}",
        str(sum(score.passed_over > 0 for score in scores)),
        f"{max(score.passed_over for score in scores):.3f}",
        f"{statistics.mean(score.probes for score in scores):.1f}",
        f"{statistics.mean(score.ooms for score in scores):.2f}",
        str(sum(not score.is_decided for score in scores)),
    ]
    return f"| {' | '.join(cells)} |"


def grid_row(name: str, *, lines: bool, times: bool, seeds: int) -> str:
    """Search a recorded grid with several seeds; return a row of the table."""
    fractions, probes, ooms = [], [], []
    for seed in range(seeds):
        world = grid_world(name, seed=seed)
        result = run_search(world.prober(), world.spec(lines=lines, times=times))
        ran = probes_of(result.trials)
        fractions.append(world.speed(result.best.plan) / world.optimum())
        probes.append(len(ran))
        ooms.append(sum(not t.ok and t.measurement.outcome.about_memory for t in ran))
    known = "lines and times" if times else "lines" if lines else "nothing"
    return (
        f"| {name} | {known} | {statistics.mean(fractions):.3f} | {min(fractions):.3f} "
        f"| {statistics.mean(probes):.1f} | {statistics.mean(ooms):.2f} |"
    )


def scores_of(jobs: Sequence[Job], workers: int, written: Path | None) -> list[Score]:
    """Run the searches that are not written down yet, and write each down; return all scores."""
    lines = written.read_text().splitlines() if written and written.exists() else []
    scores = [Score(**json.loads(line)) for line in lines]
    done = {each.seed for each in scores}
    left = [job for job in jobs if job.seed not in done]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for found in pool.map(score, left):
            scores.append(found)
            if written is not None:
                with written.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
    return scores


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--cliffs", choices=("variants", "settings"), default="variants")
    parser.add_argument("--scores", type=Path, help="JSON lines, one a search")
    parser.add_argument("--grid-seeds", type=int, default=6)
    parser.add_argument("--max-probes", type=int)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    jobs = [
        Job(
            arguments.first_seed + index,
            NOISES[index % len(NOISES)],
            arguments.cliffs,
            arguments.max_probes,
        )
        for index in range(arguments.devices)
    ]
    scores = scores_of(jobs, arguments.workers, arguments.scores)
    if scores:
        print("| noise | searches | mean regret | 90th | passed over | by at most |", end="")
        print(" probes | OOM | not decided |")
        print("|---|---|---|---|---|---|---|---|---|")
        for noise in sorted({each.noise for each in scores}):
            print(_row(f"{noise:g}", [each for each in scores if each.noise == noise]))
        print(_row("up to 0.02", [each for each in scores if each.noise <= 0.02]))
        print(_row("all", scores))
    if arguments.grid_seeds:
        print("\n| grid | predicted | mean of the best | worst | probes | OOM |")
        print("|---|---|---|---|---|---|")
        for name in WORKLOADS:
            for lines, times in ((False, False), (True, False), (True, True)):
                print(grid_row(name, lines=lines, times=times, seeds=arguments.grid_seeds))


if __name__ == "__main__":
    main()
