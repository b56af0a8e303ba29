"""Searches shared by simulated workers in one process, in random orders of their moments.

    python -m benchmarks.shared_searches --searches 1000    (an hour)

Every search has 2 to 4 workers, of which any number but one is lost at a random moment. Counted are
searches in which two workers ran one plan at the same time, in which workers that came to the end
return different reports, in which a trial that was recorded is missing, or a trial is left
unfinished; and the regret of the answers, beside that of one worker alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import replace

import optuna
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from autofit.plan import Dimension, Scalar
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.testing import SimulatedProber
from tests.shared_workers import OneWorker, searched_together
from tests.simulated import SimulatedDevice

_PRECISIONS: tuple[Scalar, ...] = ("as_is", "bfloat16")
_LEVELS: tuple[Scalar, ...] = (0, 1, 2)


def main() -> None:
    """Run the searches and print a line of Markdown for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=70_000)
    parser.add_argument("--alone", action="store_true", help="search alone, too, and compare")
    asked = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found: dict[int, list[dict[str, float]]] = {2: [], 3: [], 4: []}
    for seed in range(asked.first_seed, asked.first_seed + asked.searches):
        workers = 2 + seed % 3
        found[workers].append(_score(seed, workers, asked.alone))
        done = seed - asked.first_seed + 1
        if done % 50 == 0 or done == asked.searches:
            _show(found, done)


def _score(seed: int, workers: int, alone: bool) -> dict[str, float]:
    order = random.Random(seed)
    dimensions = {"precision.dtype": Dimension(_PRECISIONS)}
    if seed % 10 == 0:
        dimensions["checkpointing.level"] = Dimension(_LEVELS)
    space = Space(
        dimensions,
        sample_batch_size=order.choice([1, 2, 4]),
        global_batch=order.choice([None, None, 64]),
    )
    device = SimulatedDevice(space, budget=order.randrange(3, 24) * 2**30)
    spec = replace(device.spec(), seed=seed)

    def prober() -> SimulatedProber:
        return SimulatedProber(
            device.budget,
            device.memory,
            device.step_time,
            memory_noise=0.005,
            time_noise=0.01,
            seed=order.randrange(10**6),
        )

    def make(storage: InMemoryStorage) -> OneWorker:
        return OneWorker(storage, spec, prober())

    optimum = device.optimum()
    score = {"at_once": 0.0, "reports_differ": 0.0, "left_unfinished": 0.0}
    if alone:
        one = run_search(prober(), spec)
        score |= {
            "regret_alone": 1 - device.speed(one.best.plan) / optimum,
            "probes_alone": one.probes,
        }
    lost = order.randrange(workers)
    score["lost"] = lost
    try:
        everybody = searched_together(make, workers, order, lost)
    except AssertionError as failed:
        print(f"seed {seed}: {failed}")
        score["at_once"] = 1.0
        return score
    ended = [worker for worker in everybody if worker.record is not None]
    reports = [worker.record.to_dict() for worker in ended if worker.record is not None]
    last = everybody[-1]
    assert last.result is not None
    score["reports_differ"] = float(any(report != reports[0] for report in reports))
    study = last.store.study
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    score["left_unfinished"] = float(bool(running))
    score["regret"] = 1 - device.speed(last.result.best.plan) / optimum
    score["probes"] = last.result.probes
    return score


def _show(found: dict[int, list[dict[str, float]]], done: int) -> None:
    print(f"\n{done} searches\n")
    print(
        "| workers | searches | workers lost | a plan twice at once | reports differ | unfinished "
        "| regret, mean and worst | probes | of one worker: regret | probes |\n|" + " ---: |" * 10
    )
    for workers, scores in found.items():
        if scores:
            counts = " | ".join(
                f"{sum(score[name] for score in scores):g}"
                for name in ("lost", "at_once", "reports_differ", "left_unfinished")
            )
            print(
                f"| {workers} | {len(scores)} | {counts} | {_regret(scores, 'regret')} "
                f"| {_mean(scores, 'probes')} | {_regret(scores, 'regret_alone')} "
                f"| {_mean(scores, 'probes_alone')} |",
                flush=True,
            )


def _regret(scores: list[dict[str, float]], name: str) -> str:
    regrets = [score[name] for score in scores if name in score]
    return f"{statistics.fmean(regrets):.2%}, {max(regrets):.2%}" if regrets else "-"


def _mean(scores: list[dict[str, float]], name: str) -> str:
    counts = [score[name] for score in scores if name in score]
    return f"{statistics.fmean(counts):.1f}" if counts else "-"


if __name__ == "__main__":
    main()
