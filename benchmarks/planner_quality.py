"""The quality of the planner on simulated devices, compared with Optuna's own samplers.

Prints Markdown. Every search uses the same engine and prober interface as a search on a real
device. The planner ends by itself; the other samplers have 30 probes. "Fraction" is the true speed,
without noise, of the returned plan, divided by that of the best plan of the whole space that fits.
"After n probes" is the fraction if the search were cut there; a search that ended earlier has its
final answer. "OOM" counts probes that ran out of memory, and "probes" all probes, baseline and
confirmations included.

    python -m benchmarks.planner_quality                      all samplers on 200 devices (hours)
    python -m benchmarks.planner_quality --others 0 --gp 0    the planner alone (minutes)

The planner was tuned on seeds below 10 000; devices here begin at 10 000.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from autofit.errors import NoFeasiblePlan
from autofit.measurement import Trial, TrialKind
from autofit.planning.confirmation import best_of
from autofit.planning.posterior import Posterior
from autofit.searching.engine import run_search
from benchmarks.simulated_devices import draw_device

FIRST_SEED = 10_000
CUTS = (8, 15, 30)
_TARGETS = {
    False: "targets: mean >= 0.97, 10th percentile >= 0.93, <= 18 probes, <= 0.4 OOM",
    True: "targets: mean >= 0.98, 10th percentile >= 0.95, <= 15 probes, <= 0.15 OOM",
}
_Samplers = dict[str, Callable[[int], BaseSampler]]
_OTHERS: _Samplers = {
    "TPE": lambda seed: TPESampler(seed=seed),
    "GP": lambda seed: GPSampler(seed=seed, deterministic_objective=False),
    "random": lambda seed: RandomSampler(seed=seed),
}


@dataclass(frozen=True)
class Job:
    """One search: the seed of its device, and its sampler; None: the planner."""

    seed: int
    sampler: str | None
    hints: bool
    veto: bool


@dataclass(frozen=True)
class Score:
    """One search on one device.

    Attributes:
        after: fraction of the optimum after each of `CUTS` probes.
        end: fraction of the optimum reached by the returned plan.
        oom_probes: probes that ran out of memory.
        baseline_oom: whether the baseline, which the planner does not choose, was one of them.
        probes: all probes.
    """

    after: tuple[float, ...]
    end: float
    oom_probes: int
    baseline_oom: bool
    probes: int


def score(job: Job) -> Score:
    """Run the search that the job describes, in any process."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    device = draw_device(job.seed, hints=job.hints)
    spec, optimum = device.spec(), device.optimum()
    seen: list[Trial] = []
    try:
        result = run_search(
            device.prober(),
            spec,
            sampler=None if job.sampler is None else _OTHERS[job.sampler](job.seed),
            max_probes=None if job.sampler is None else CUTS[-1],
            veto=job.veto,
            on_event=lambda event: seen.append(event.trial) if hasattr(event, "trial") else None,
        )
    except NoFeasiblePlan:
        probes = [trial for trial in seen if trial.kind is not TrialKind.VETOED]
        return Score((0.0,) * len(CUTS), 0.0, _ooms(probes), True, len(probes))
    probes = [trial for trial in result.trials if trial.kind is not TrialKind.VETOED]
    end = device.speed(result.best.plan) / optimum
    after = []
    for cut in CUTS:
        best = best_of(Posterior(spec, probes[:cut])) if len(probes) > cut else result.best
        after.append(0.0 if best is None else device.speed(best.plan) / optimum)
    return Score(tuple(after), end, _ooms(probes), not probes[0].ok, len(probes))


def _ooms(probes: list[Trial]) -> int:
    return sum(not trial.ok and trial.measurement.outcome.about_memory for trial in probes)


def measure(pool: Executor, count: int, sampler: str | None, *, hints: bool, veto: bool) -> str:
    """Return a row of the table: one sampler on that many devices."""
    began = time.perf_counter()
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    scores = list(pool.map(score, [Job(seed, sampler, hints, veto) for seed in seeds]))
    name = f"{sampler}, {'with' if veto else 'without'} the veto" if sampler else "planner"
    row = [name, str(count)]
    for index in range(len(CUTS)):
        row.append(_spread([score.after[index] for score in scores]))
    row.append(_spread([score.end for score in scores]))
    row.append(f"{statistics.mean(score.oom_probes for score in scores):.3f}")
    row.append(f"{statistics.mean(score.baseline_oom for score in scores):.3f}")
    row.append(f"{statistics.mean(score.probes for score in scores):.1f}")
    row.append(str(max(score.probes for score in scores)))
    print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return f"| {' | '.join(row)} |"


def _spread(fractions: list[float]) -> str:
    return f"{statistics.mean(fractions):.3f} ({np.quantile(fractions, 0.1):.3f})"


def table(pool: Executor, count: int, others: dict[str, int], *, hints: bool) -> list[str]:
    """Return the table of one kind of device, as Markdown lines."""
    cuts = " | ".join(f"after {cut}" for cut in CUTS)
    lines = [
        f"## {'With hints within 10 % of the truth' if hints else 'Without hints'}",
        "",
        f"{_TARGETS[hints]}. Fractions are means, with the 10th percentile in brackets.",
        "",
        f"| sampler | devices | {cuts} | at its end | OOM | baseline OOM | probes | most |",
        "|---|---" + "|---" * (len(CUTS) + 5) + "|",
        measure(pool, count, None, hints=hints, veto=True),
    ]
    for name, devices in others.items():
        for veto in (True, False) if devices else ():
            lines.append(measure(pool, devices, name, hints=hints, veto=veto))
    return [*lines, ""]


def main() -> None:
    """Measure, print, and write to `--out` if given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=200, help="for the planner")
    parser.add_argument("--others", type=int, default=200, help="for TPE and random; 0: none")
    parser.add_argument("--gp", type=int, default=200, help="for GP, which is slow; 0: none")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    others = {"TPE": arguments.others, "GP": arguments.gp, "random": arguments.others}
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        tables = [
            *table(pool, arguments.devices, others, hints=False),
            *table(pool, arguments.devices, {}, hints=True),
            "The other samplers know nothing of hints: their rows above stand for both.",
        ]
    lines = [
        f"# Planner quality, {date.today()}",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"optuna {optuna.__version__}, numpy {np.__version__}; no GPU is involved. "
        f"Devices: seeds from {FIRST_SEED}.",
        "",
        *tables,
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
