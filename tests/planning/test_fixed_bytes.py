"""Trainings whose parameters, gradients and optimizer state fill most of the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from autofit.measurement import Outcome, Trial
from autofit.memory.blocks import LARGE_SEGMENT_BYTES
from autofit.plan import CostHint, Dimension, Plan
from autofit.planning.beliefs import Beliefs
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB
from tests.simulated import DIMENSIONS, LEVEL, make_trial

FIXED = 8 * GIB
HINTED = Dimension(
    range(5),
    hints={n: CostHint(1 - 0.15 * n, seconds_per_sample=1 + 0.08 * n) for n in range(1, 5)},
)
"""Levels of checkpointing, with the hints that the strategy gives."""


@dataclass(frozen=True)
class Training:
    """A training with so much that is fixed.

    Attributes:
        share: of the budget that is fixed.
        room: plain samples that fit beside it.
        launches: the fixed time of a micro-batch, in samples.
        global_batch, samples: of the space; the baseline may not fit.
        has_settings: whether there is a choice of precision and placement too.
        temporaries: of what is fixed, which is not there when an update begins.
    """

    share: float
    room: int
    launches: float
    global_batch: int | None
    samples: int
    has_settings: bool = False
    temporaries: float = 0.05

    @property
    def space(self) -> Space:
        dimensions = {**DIMENSIONS, LEVEL: HINTED} if self.has_settings else {}
        return Space(dimensions, self.samples, global_batch=self.global_batch)

    @property
    def budget(self) -> int:
        return round(FIXED / self.share)

    def memory(self, plan: Plan) -> float:
        level: Any = plan.settings.get(LEVEL, 0)
        half = plan.settings.get("precision.dtype") == "bfloat16"
        factor = (0.7 if half else 1.0) * (1 - 0.15 * level)
        return FIXED + (self.budget - FIXED) / self.room * factor * plan.micro_batch

    def step_time(self, plan: Plan) -> float:
        level: Any = plan.settings.get(LEVEL, 0)
        half = plan.settings.get("precision.dtype") == "bfloat16"
        of_sample = (0.6 if half else 1.0) * (1 + 0.08 * level)
        samples = plan.micro_batch if self.global_batch is None else self.global_batch
        return 1e-3 * (self.launches * plan.accumulation_steps + of_sample * samples)

    def speed(self, plan: Plan) -> float:
        return plan.samples_per_step / self.step_time(plan)

    def best_speed(self) -> float:
        plans = (
            self.space.plan(size, settings)
            for settings in self.space.variants()
            for size in range(1, min(self.space.largest_micro_batch, 20 * self.room) + 1)
        )
        return max(self.speed(plan) for plan in plans if self.memory(plan) <= self.budget)

    def prober(self) -> SimulatedProber:
        return SimulatedProber(
            self.budget,
            self.memory,
            self.step_time,
            resident=lambda plan: (1 - self.temporaries) * FIXED,
            time_noise=0.005,
            step_noise=0.01,
        )

    def spec(self) -> SearchSpec:
        return SearchSpec(self.space, self.budget, segment_bytes=LARGE_SEGMENT_BYTES)


TRAININGS = [
    Training(0.7, 12, 5.0, 512, 512),
    Training(0.75, 40, 2.0, 512, 512),
    Training(0.8, 6, 3.0, 256, 256),
    Training(0.85, 100, 4.0, 256, 256),
    Training(0.9, 20, 5.0, 512, 8),
    Training(0.9, 30, 1.0, None, 64),
    Training(0.8, 50, 5.0, None, 4, temporaries=0.2),
    Training(0.85, 16, 3.0, 512, 512, temporaries=0.25),
    Training(0.8, 16, 3.0, 256, 256, has_settings=True),
    Training(0.9, 24, 4.0, 512, 8, has_settings=True),
]


@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_the_answer_is_near_the_best_of_all_plans_within_15_probes(training: Training) -> None:
    prober = training.prober()
    result = run_search(prober, training.spec())
    assert training.speed(result.best.plan) >= 0.97 * training.best_speed()
    assert len(prober.probed) <= 15


def _after(resident_bytes: int | None) -> Beliefs:
    """The beliefs after one probe of one sample, which held 85 % of the budget."""
    space = Space({"optimizer.state": Dimension(("default", "8bit"))}, 1)
    held = round(0.85 * GIB)
    trial = make_trial(
        0,
        space.baseline,
        step_times_s=[0.01] * 3,
        peak_allocated_bytes=held,
        peak_reserved_bytes=held,
        non_torch_bytes=0,
        resident_bytes=resident_bytes,
    )
    return Beliefs(SearchSpec(space, GIB), [trial])


def test_what_is_resident_is_no_samples() -> None:
    known, unknown = _after(round(0.8 * GIB)), _after(None)
    assert known.held.lines.coefficients[0, 0] >= math.log(0.76 * GIB)
    assert known.held.limits(0.5)[0] >= 2
    assert known.held.limits(0.5)[0] > unknown.held.limits(0.5)[0]


def test_a_variant_that_holds_less_is_measured_for_itself() -> None:
    known = _after(round(0.8 * GIB))
    plan = Plan(1, settings={"optimizer.state": "8bit"})
    half: dict[str, Any] = {
        "step_times_s": [0.01] * 3,
        "peak_allocated_bytes": round(0.45 * GIB),
        "peak_reserved_bytes": round(0.45 * GIB),
        "non_torch_bytes": 0,
        "resident_bytes": round(0.4 * GIB),
    }
    trials: list[Trial] = [*known.measured, make_trial(1, plan, **half)]
    after = Beliefs(known.spec, trials)
    assert after.held.quantile(plan) == pytest.approx(0.45 * GIB, rel=0.05)
    assert after.held.lines.coefficients[0, 1] < math.log(0.5 * GIB)


def test_the_baselines_oom_makes_no_further_one_dearer() -> None:
    spec = SearchSpec(Space({}, 64), GIB)
    held: dict[str, Any] = {
        "step_times_s": [0.01] * 3,
        "peak_reserved_bytes": GIB // 2,
        "non_torch_bytes": 0,
    }
    fits = make_trial(1, Plan(8), **held)
    risk = np.array([0.1])
    alone = Beliefs(spec, [fits]).oom_cost(risk)
    after = Beliefs(spec, [make_trial(0, Plan(64), Outcome.OOM), fits]).oom_cost(risk)
    chosen = Beliefs(spec, [fits, make_trial(2, Plan(64), Outcome.OOM)]).oom_cost(risk)
    assert after == alone
    assert chosen > alone
