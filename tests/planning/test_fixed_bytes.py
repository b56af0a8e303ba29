"""Trainings whose parameters, gradients and optimizer state fill most of the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from autofit.measurement import Outcome, Trial
from autofit.plan import CostHint, Dimension, Plan
from autofit.planning.beliefs import Beliefs
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB, LARGE_SEGMENT_BYTES
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


GRADIENTS = 2 * GIB
"""Of weights, gradients and two moments."""


@dataclass(frozen=True)
class Gradual(Training):
    """A training whose gradients are made while activations go, if a step has one micro-batch.

    Attributes:
        room: plain samples that fit beside weights and moments.
        cast: what bfloat16 holds besides, as a share of the budget.
    """

    cast: float = 0.0

    def memory(self, plan: Plan) -> float:
        level: Any = plan.settings.get(LEVEL, 0)
        half = plan.settings.get("precision.dtype") == "bfloat16"
        factor = (0.7 if half else 1.0) * (1 - 0.15 * level)
        beside = FIXED - (GRADIENTS if plan.accumulation_steps == 1 else 0)
        of_sample = (self.budget - FIXED + GRADIENTS) / self.room
        held = beside + of_sample * factor * plan.micro_batch
        return max(held, FIXED) + (self.cast * self.budget if half else 0.0)

    def prober(self) -> SimulatedProber:
        return SimulatedProber(
            self.budget,
            self.memory,
            self.step_time,
            resident=lambda plan: FIXED,
            gradients=lambda plan: GRADIENTS,
            time_noise=0.005,
            step_noise=0.01,
        )


GRADUAL = [
    Gradual(0.8, 34, 8.0, 32, 4),
    Gradual(0.85, 24, 8.0, 32, 4, has_settings=True),
    Gradual(0.85, 24, 8.0, 32, 4, has_settings=True, cast=0.1),
    Gradual(0.9, 40, 6.0, 64, 8, has_settings=True, cast=0.08),
    Gradual(0.75, 30, 10.0, 48, 48, has_settings=True),
]


@pytest.mark.parametrize("training", GRADUAL, ids=str)
def test_the_whole_batch_is_run_where_its_gradients_take_no_room(training: Gradual) -> None:
    """Where smaller micro-batches run out of memory, since gradients are held beside them."""
    result = run_search(training.prober(), training.spec())
    assert result.best.plan.accumulation_steps == 1
    assert training.speed(result.best.plan) >= 0.9 * training.best_speed()
    assert result.search.probes <= 15


def test_what_runs_out_of_memory_beside_gradients_bounds_no_step_without() -> None:
    spec = SearchSpec(Space(DIMENSIONS, 4, global_batch=32), GIB)
    plain = spec.space.default_settings
    held: dict[str, Any] = {
        "step_times_s": [0.1] * 3,
        "peak_allocated_bytes": round(0.95 * GIB),
        "peak_reserved_bytes": round(0.95 * GIB),
        "non_torch_bytes": 0,
        "resident_bytes": round(0.9 * GIB),
    }
    failed = make_trial(1, spec.space.plan(8, plain), Outcome.OOM)
    for gradients, largest in ((None, 7), (0, 7), (round(0.45 * GIB), 32)):
        first = make_trial(0, spec.space.plan(4, plain), **held, gradient_bytes=gradients)
        beliefs = Beliefs(spec, [first, failed])
        found = int(beliefs.largest_at(0.5)[0])
        assert found <= largest
        assert (found == 32) is (largest == 32)
        assert beliefs.bound_at(0, 8) == 7


def test_a_whole_batch_that_ran_out_of_memory_tells_no_more_than_the_budget() -> None:
    """Its gradients may be there while most activations are, as where late layers are wide."""
    spec = SearchSpec(Space({}, 20, global_batch=60, world_size=3), round(8.7 * GIB))
    held: dict[str, Any] = {"non_torch_bytes": 0, "resident_bytes": 8 * GIB}
    trials = [
        make_trial(0, spec.space.plan(20, {}), Outcome.OOM),
        make_trial(1, spec.space.plan(5, {}), peak_reserved_bytes=round(8.43 * GIB), **held),
    ]
    known, unknown = (
        Beliefs(spec, [trials[0], replace(trials[1], measurement=measured)])
        for measured in (
            replace(trials[1].measurement, gradient_bytes=gradients)
            for gradients in (2 * GIB, None)
        )
    )
    sevens = spec.space.plan(7, {})
    assert known.oom_risk(sevens) == pytest.approx(unknown.oom_risk(sevens))


def test_a_whole_batch_that_ran_out_of_memory_bounds_every_plan() -> None:
    spec = SearchSpec(Space(DIMENSIONS, 4, global_batch=32), GIB)
    plain = spec.space.default_settings
    first = make_trial(
        0, spec.space.plan(4, plain), peak_reserved_bytes=GIB // 2, gradient_bytes=GIB // 4
    )
    beliefs = Beliefs(spec, [first, make_trial(1, spec.space.plan(32, plain), Outcome.OOM)])
    assert beliefs.bound_at(0, 32) == beliefs.bound_at(0, 16) == 31


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
