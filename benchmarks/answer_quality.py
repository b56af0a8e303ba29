"""How good a search's answer is where speed is irregular and measurements are noisy.

Prints Markdown: searches on `benchmarks.irregular_devices`, by noise between probes, and on the
recorded grids of `benchmarks.grids`. "Regret" is 1 - the true speed of the answer over that of the
best plan of the whole space. "Passed over" counts answers slower than another plan that the same
search measured, beyond the 95 % interval that the noise of the device gives their measurements.

    python -m benchmarks.answer_quality --devices 1000      (minutes)

Seeds from 50 000; nothing was tuned on them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import optuna

from autofit.errors import NoFeasiblePlan
from autofit.measurement import Trial, probes_of
from autofit.plan import Plan
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
        noise: between probes.
        regret: 1 - speed of the answer / that of the best plan; 1 where nothing was found.
        passed_over: log by which a measured plan was faster than the answer, beyond the interval.
        probes, ooms: counts.
    """

    noise: float
    regret: float
    passed_over: float
    probes: int
    ooms: int


def score(job: tuple[int, float, int | None]) -> Score:
    """Search one device: (seed, noise, the most probes)."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seed, noise, max_probes = job
    device = draw_irregular_device(seed, noise=noise)
    optimum = device.optimum()
    try:
        result = run_search(device.prober(), device.spec(), max_probes=max_probes)
    except NoFeasiblePlan:
        return Score(noise, 0.0 if optimum == 0 else 1.0, 0.0, 0, 0)
    probes = probes_of(result.trials)
    return Score(
        noise,
        1 - device.speed(result.best.plan) / optimum,
        passed_over(probes, result.best.plan, noise),
        len(probes),
        sum(not t.ok and t.measurement.outcome.about_memory for t in probes),
    )


def passed_over(probes: Sequence[Trial], best: Plan, noise: float) -> float:
    """Return by how much, as a log, another plan was measured faster beyond their interval."""
    logs: dict[Plan, list[float]] = defaultdict(list)
    for trial in probes:
        if trial.ok and trial.samples_per_second:
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
    ]
    return f"| {' | '.join(cells)} |"


def grid_row(name: str, *, lines: bool, seeds: int) -> str:
    """Search a recorded grid with several seeds; return a row of the table."""
    fractions, probes, ooms = [], [], []
    for seed in range(seeds):
        world = grid_world(name, seed=seed)
        result = run_search(world.prober(), world.spec(lines=lines))
        ran = probes_of(result.trials)
        fractions.append(world.speed(result.best.plan) / world.optimum())
        probes.append(len(ran))
        ooms.append(sum(not t.ok and t.measurement.outcome.about_memory for t in ran))
    return (
        f"| {name} | {'with' if lines else 'without'} | {statistics.mean(fractions):.3f} "
        f"| {min(fractions):.3f} | {statistics.mean(probes):.1f} | {statistics.mean(ooms):.2f} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--grid-seeds", type=int, default=10)
    parser.add_argument("--max-probes", type=int)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print("| noise | searches | mean regret | 90th | passed over | by at most | probes | OOM |")
    print("|---|---|---|---|---|---|---|---|")
    jobs = [
        (arguments.first_seed + index, NOISES[index % len(NOISES)], arguments.max_probes)
        for index in range(arguments.devices)
    ]
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        scores = list(pool.map(score, jobs, chunksize=4))
    for noise in NOISES:
        print(_row(f"{noise:g}", [s for s in scores if s.noise == noise]))
    print(_row("all", scores))
    print("\n| grid | memory lines | mean of the best | worst | probes | OOM |")
    print("|---|---|---|---|---|---|")
    for name in WORKLOADS if arguments.grid_seeds else ():
        for lines in (False, True):
            print(grid_row(name, lines=lines, seeds=arguments.grid_seeds))


if __name__ == "__main__":
    main()
