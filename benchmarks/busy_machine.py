"""How often an answer is wrong where others use the machine too.

Searches of two plans or a few, of which one is faster than the baseline by a known ratio, on
machines that are busy in several ways:

- "slices": another process takes some milliseconds from a share of the steps;
- "wild": steps scatter, and their median stands still;
- "drift": the steps of a probe are all alike, and each probe is slower or faster as a whole;
- "slow": all takes 1.6 times as long for some probes in a row, as for a minute.

An answer is wrong where it is decided and another plan that the search measured is faster by more
than 5 % on the quiet machine; and where its factor is decided and the baseline is faster by more
than that. Prints Markdown.

    python -m benchmarks.busy_machine    (a minute on two cores)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context

import optuna

from autofit.measurement import Measurement, probes_of
from autofit.plan import Plan
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.searching.result import SearchResult
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import MIB

KINDS = {
    "slices": (0.1, 0.2, 0.3, 0.4, 0.5),
    "wild": (0.2, 0.7),
    "drift": (0.05, 0.2, 0.4),
    "slow": (2.0, 4.0),
}
"""Kind -> share of the steps hit, deviations of logs, and probes for which all is slow."""
RATIOS = (1.1, 1.5, 2.8)
COUNTS = (4, 6, 8, None)
MOST_LOST = 0.05
_BASELINE_S = 5.8e-4
_SLICE_S = 5e-3
_SLOWER = 1.6
_SMALL, _LARGE = 8, 32


@dataclass(frozen=True)
class Case:
    """A search: how busy the machine is, how much faster 32 samples are than 8, and the probes."""

    kind: str
    amount: float
    ratio: float
    max_probes: int | None
    seed: int

    def step_time(self, plan: Plan) -> float:
        """Return the seconds of an optimizer step on the quiet machine."""
        growth = _LARGE / _SMALL / self.ratio - 1
        share = (plan.micro_batch - _SMALL) / (_LARGE - _SMALL)
        return _BASELINE_S * (1 + growth * share)

    def speed(self, plan: Plan) -> float:
        """Return samples per second on the quiet machine."""
        return plan.samples_per_step / self.step_time(plan)

    def search(self) -> SearchResult:
        """Search on the busy machine."""
        space, begun = Space({}, _SMALL, max_micro_batch=_LARGE), 0
        slow_from = self.seed % 5

        def begin(plan: Plan) -> Measurement | None:
            nonlocal begun
            begun += 1
            return None

        def step_time(plan: Plan) -> float:
            is_slow = self.kind == "slow" and slow_from < begun <= slow_from + self.amount
            return self.step_time(plan) * (_SLOWER if is_slow else 1.0)

        prober = SimulatedProber(
            32 * MIB,
            lambda plan: MIB + 2**14 * plan.micro_batch,
            step_time,
            time_noise=self.amount if self.kind == "drift" else 0.002,
            step_noise=self.amount if self.kind == "wild" else 0.02,
            slices=(self.amount, _SLICE_S) if self.kind == "slices" else (0.0, 0.0),
            fault=begin,
            seed=self.seed,
        )
        spec = SearchSpec(space, prober.vram_budget_bytes, self.seed)
        return run_search(prober, spec, max_probes=self.max_probes)


@dataclass(frozen=True)
class Score:
    """The end of a search.

    Attributes:
        is_decided: whether it named an answer.
        is_factor_decided: whether it told the answer's speed over the baseline's.
        lost: 1 - the answer's speed over that of the fastest plan that was measured, both quiet.
        lost_to_baseline: 1 - the answer's speed over the baseline's, both quiet.
        probes: how many there were.
    """

    is_decided: bool
    is_factor_decided: bool
    lost: float
    lost_to_baseline: float
    probes: int

    @property
    def is_wrong(self) -> bool:
        """Whether a plan was named that is slower than another measured one."""
        is_slower = self.is_factor_decided and self.lost_to_baseline > MOST_LOST
        return is_slower or (self.is_decided and self.lost > MOST_LOST)


def score(case: Case) -> Score:
    """Search once."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    result = case.search()
    speeds = [case.speed(trial.plan) for trial in result.trials if trial.ok]
    best = case.speed(result.best.plan)
    return Score(
        result.is_decided,
        result.is_factor_decided,
        1 - best / max(speeds),
        1 - best / case.speed(result.baseline.plan),
        len(probes_of(result.trials)),
    )


def cases(kind: str, amount: float, seeds: int) -> Iterator[Case]:
    """Yield the searches of a row of the table."""
    for ratio, count, seed in product(RATIOS, COUNTS, range(seeds)):
        yield Case(kind, amount, ratio, count, seed)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    print("| machine | amount | searches | wrong | not decided | factor | probes |")
    print("|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        for kind, amounts in KINDS.items():
            for amount in amounts:
                scores = list(pool.map(score, cases(kind, amount, arguments.seeds), chunksize=8))
                wrong = sum(each.is_wrong for each in scores)
                undecided = sum(not each.is_decided for each in scores)
                probes = sum(each.probes for each in scores) / len(scores)
                factors = sum(not each.is_factor_decided for each in scores)
                row = (kind, f"{amount:g}", len(scores), wrong, undecided, factors, f"{probes:.1f}")
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
