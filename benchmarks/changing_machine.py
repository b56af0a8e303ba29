"""How far a printed factor is off where the machine becomes slower amid a search.

Searches on `benchmarks.irregular_devices` whose step times grow fourfold after some probes, all at
once, as where another job starts beside the search. Prints, for those searches whose answer is not
the baseline, by what factor the printed one differs from the true one.

    python -m benchmarks.changing_machine --devices 24    (a minute on two cores)

Seeds from 61 000; nothing was tuned on them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import optuna

from autofit.measurement import Measurement, TrialKind, compared_log_speed, probes_of
from autofit.plan import Plan
from autofit.searching.engine import run_search
from autofit.testing import SimulatedProber
from benchmarks.irregular_devices import draw_irregular_device

FIRST_SEED = 61_000
_SLOWER = 4.0
_EARLIEST, _LATEST = 15, 20  # probes before it happens: about where the final comparison begins


@dataclass(frozen=True)
class Score:
    """One search.

    Attributes:
        off: the printed factor over the true one, or its inverse: at least 1; None: none printed.
        probes, compared: how many there were, and how many of them in the final comparison.
    """

    off: float | None
    probes: int
    compared: int


def score(seed: int) -> Score:
    """Search the device of a seed."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    device = draw_irregular_device(seed, noise=0.02, cliffs="settings")
    quick_probes = _EARLIEST + seed % (_LATEST - _EARLIEST + 1)
    begun = 0

    def begin(plan: Plan) -> Measurement | None:
        nonlocal begun
        begun += 1
        return None

    def step_time(plan: Plan) -> float:
        return device.step_time(plan) * (_SLOWER if begun >= quick_probes else 1.0)

    prober = SimulatedProber(
        device.device.budget_bytes,
        device.device.memory,
        step_time,
        time_noise=0.02,
        step_noise=0.05,
        size_limit=device.device.size_limit,
        fault=begin,
        seed=seed,
    )
    result = run_search(prober, device.spec())
    best, baseline = result.best.plan, device.space.baseline
    blocks = [t for t in result.trials if t.kind is TrialKind.CONFIRMATION and t.ok]
    of_best, of_baseline = ([t for t in blocks if t.plan == plan] for plan in (best, baseline))
    off = None
    if best != baseline and of_best and of_baseline:
        printed = compared_log_speed(of_best) - compared_log_speed(of_baseline)
        true = math.log(device.speed(best) / device.speed(baseline))
        off = math.exp(abs(printed - true))
    return Score(off, len(probes_of(result.trials)), len(blocks))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.devices)
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        scores = list(pool.map(score, seeds))
    off = sorted(each.off for each in scores if each.off is not None)
    print("| searches | factors printed | off by, median | 90th | probes | compared |")
    print("|---|---|---|---|---|---|")
    cells = [
        str(len(scores)),
        str(len(off)),
        f"{statistics.median(off):.2f}",
        f"{off[int(0.9 * len(off))]:.2f}",
        f"{statistics.mean(each.probes for each in scores):.1f}",
        f"{statistics.mean(each.compared for each in scores):.1f}",
    ]
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
