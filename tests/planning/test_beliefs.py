"""The beliefs: which measurements it uses, and how far it believes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from autofit.measurement import Outcome, Trial, probes_of
from autofit.plan import CostHint, Dimension, Plan
from autofit.planning.beliefs import Beliefs
from autofit.planning.noise import BETWEEN, Noise
from autofit.planning.search_spec import SearchSpec
from autofit.report.record import Record
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB, LARGE_SEGMENT_BYTES, MIB
from tests.simulated import (
    DIMENSIONS,
    HALF,
    LEVEL,
    PLAIN,
    SimulatedDevice,
    make_trial,
    with_predicted_lines,
)


def test_a_size_limit_bounds_its_variant_and_moves_no_memory_line(device: SimulatedDevice) -> None:
    spec = device.spec()
    baseline = make_trial(
        0, Plan(4, settings=PLAIN), step_times_s=[0.1] * 6, peak_reserved_bytes=2 * 2**30
    )
    limited = make_trial(1, Plan(8, settings=HALF), Outcome.SIZE_LIMIT)
    known = Beliefs(spec, [baseline, limited])
    assert known.exclusions.bound(HALF) == 7
    alone = Beliefs(spec, [baseline])
    assert len(known.held.readings) == len(alone.held.readings) == 1


@pytest.mark.parametrize(("contended", "at_least"), [(False, 24 * GIB), (True, 3 * GIB)])
def test_a_contended_oom_is_a_lower_bound_at_the_bytes_held(
    device: SimulatedDevice, contended: bool, at_least: int
) -> None:
    spec = replace(device.spec(), vram_budget_bytes=24 * GIB)
    ran_out = make_trial(
        0, Plan(8, settings=PLAIN), Outcome.OOM, peak_reserved_bytes=3 * GIB, contended=contended
    )
    (reading,) = Beliefs(spec, [ran_out]).held.readings
    assert math.exp(reading.log) == pytest.approx(at_least)
    assert reading.at_least


@pytest.mark.parametrize(
    ("steps", "believed"),
    [([0.1] * 6, (0.015, 0.035)), ([0.07, 0.13, 0.08, 0.12, 0.09, 0.11], (0.0, 0.02))],
)
def test_a_plan_that_repeats_well_keeps_its_own_speed_and_a_noisy_one_that_of_its_line(
    device: SimulatedDevice, steps: list[float], believed: tuple[float, float]
) -> None:
    def speed_of_16(factor: float) -> float:
        trials = [
            make_trial(
                number,
                Plan(size, settings=PLAIN),
                step_times_s=[size * (factor if size == 16 else 1.0) * step for step in steps],
            )
            for number, size in enumerate((4, 8, 16, 32))
        ]
        return Beliefs(device.spec(), trials).mean_log_speed(trials[2].plan)

    low, high = believed
    assert low <= speed_of_16(1.0) - speed_of_16(1.03) <= high


def test_lines_of_one_setting_at_a_time_are_composed(device: SimulatedDevice) -> None:
    """Where variants have no line of their own; levels without one lie between their neighbours."""
    spec = with_predicted_lines(device)
    few = {key: line for key, line in spec.predicted_lines.items() if dict(key)[LEVEL] in (0, 4)}
    for lines, near in ((spec.predicted_lines, 0.03), (few, 0.15)):
        beliefs = Beliefs(replace(spec, predicted_lines=lines), ())
        for index, settings in enumerate(beliefs.variants):
            plan = Plan(16, settings=settings)
            expected = beliefs.held.quantile(plan)
            assert expected == pytest.approx(device.memory(plan), rel=near), (index, settings)


@pytest.mark.parametrize(
    ("middles", "scatter", "low", "high"),
    [((1.0, 1.1, 0.9), 0.01, 0.05, 1.0), ((1.0,) * 8, 0.001, 0.0, 0.5 * BETWEEN)],
    ids=["apart", "alike"],
)
def test_repeats_that_differ_more_than_their_steps_raise_the_error(
    middles: tuple[float, ...], scatter: float, low: float, high: float
) -> None:
    trials = [
        make_trial(
            number,
            Plan(4),
            step_times_s=[middle * math.exp(scatter * place) for place in (-1.0, 0.0, 1.0)],
        )
        for number, middle in enumerate(middles)
    ]
    noise = Noise(trials)
    assert [len(each) for each in noise.repeated] == [len(middles)]
    assert low <= noise.of(trials[0]) < high


# -- Little memory is held, and that in whole segments of the caching allocator

BUDGET = 77 * MIB


@pytest.mark.slow
def test_a_line_through_whole_segments_is_not_trusted_to_the_last_bytes() -> None:
    """With the error of large trainings alone, 2 %, they ran out of memory 12 times."""
    hints: Any = {level: CostHint(bytes_per_sample=1 - 0.13 * level) for level in range(1, 6)}
    dimensions = {
        "precision.dtype": Dimension(("default", "bfloat16")),
        LEVEL: Dimension(range(6), hints=hints),
    }
    space = Space(dimensions, sample_batch_size=2, max_micro_batch=256)

    def growing_mib(plan: Plan) -> float:
        each = 3.5 if plan.settings["precision.dtype"] == "bfloat16" else 5.0
        return plan.micro_batch * each * (1 - 0.13 * int(plan.settings[LEVEL]))

    def seconds(plan: Plan) -> float:
        each = 0.008 if plan.settings["precision.dtype"] == "bfloat16" else 0.01
        return 0.02 + plan.micro_batch * each * (1 + 0.06 * int(plan.settings[LEVEL]))

    ooms = 0
    for seed in range(2):
        prober = SimulatedProber(
            BUDGET,
            lambda plan: (22 + math.ceil(growing_mib(plan) / 20) * 20) * MIB,
            seconds,
            allocated=lambda plan: (22 + growing_mib(plan)) * MIB,
            time_noise=0.02,
        )
        result = run_search(prober, SearchSpec(space, BUDGET, seed=seed, segment_bytes=20 * MIB))
        ooms += sum(t.measurement.outcome.about_memory for t in probes_of(result.trials))
        assert result.best.plan.micro_batch / seconds(result.best.plan) > 75
    assert ooms <= 2


def _in_segments(*sizes: int, allocated: bool = True) -> Beliefs:
    """Up to 10 samples hold one segment and more hold two, which looks like a steep line."""
    space = Space({}, sample_batch_size=4, max_micro_batch=256)
    trials = [
        make_trial(
            at,
            space.plan(size, {}),
            step_times_s=[0.01 * size] * 3,
            peak_allocated_bytes=(22 + 2 * size) * MIB if allocated else None,
            peak_reserved_bytes=(22 + math.ceil(size / 10) * 20) * MIB,
            non_torch_bytes=0,
        )
        for at, size in enumerate(sizes)
    ]
    return Beliefs(SearchSpec(space, BUDGET, segment_bytes=20 * MIB), trials)


def test_what_is_allocated_tells_how_much_fits_where_segments_hide_it() -> None:
    expected = 22 + 2 * 20 + 20 / 2  # MiB: as it allocates, and half a segment
    hidden, told = (
        _in_segments(4, 7, 11, allocated=each).held.quantile(Plan(20)) / MIB
        for each in (False, True)
    )
    assert told == pytest.approx(expected, rel=0.12)
    assert abs(told - expected) < abs(hidden - expected) / 2


def test_one_probe_does_not_tell_what_its_segments_hide() -> None:
    """With it alone, what is usual is what it held, rounding included."""
    first, all_of_them = _in_segments(4).held, _in_segments(4, 7, 11).held
    assert first.weigh(BUDGET)[1] == pytest.approx(first.error(BUDGET))
    assert all_of_them.weigh(BUDGET)[1] < 0.8 * all_of_them.error(BUDGET)


# -- Parameters, gradients and optimizer state fill most of the budget

FIXED = 8 * GIB
GRADIENTS = 2 * GIB
"""Of weights, gradients and two moments."""
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
        room: plain samples that fit beside it, gradients left out.
        launches: the fixed time of a micro-batch, in samples.
        global_batch, samples: of the space; the baseline may not fit.
        has_settings: whether there is a choice of precision and placement too.
        temporaries: of what is fixed, which is not there when an update begins.
        gradients: bytes that are made while activations go, if a step has one micro-batch.
        cast: what bfloat16 holds besides, as a share of the budget.
    """

    share: float
    room: int
    launches: float
    global_batch: int | None
    samples: int
    has_settings: bool = False
    temporaries: float = 0.05
    gradients: int = 0
    cast: float = 0.0

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
        beside = FIXED - (self.gradients if plan.accumulation_steps == 1 else 0)
        of_sample = (self.budget - FIXED + self.gradients) / self.room
        growing = of_sample * (0.7 if half else 1.0) * (1 - 0.15 * level) * plan.micro_batch
        return max(beside + growing, FIXED) + (self.cast * self.budget if half else 0.0)

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

    def searched(self) -> Record:
        prober = SimulatedProber(
            self.budget,
            self.memory,
            self.step_time,
            resident=lambda plan: (1 - self.temporaries) * FIXED,
            gradients=(lambda plan: self.gradients) if self.gradients else None,
            time_noise=0.005,
            step_noise=0.01,
        )
        spec = SearchSpec(self.space, self.budget, segment_bytes=LARGE_SEGMENT_BYTES)
        return run_search(prober, spec)


@pytest.mark.parametrize(
    "training",
    [
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
    ],
    ids=str,
)
def test_the_answer_is_near_the_best_of_all_plans_within_15_probes(training: Training) -> None:
    result = training.searched()
    assert training.speed(result.best.plan) >= 0.97 * training.best_speed()
    assert result.search.probes <= 15


@pytest.mark.parametrize(
    ("training", "cast"),
    [
        (Training(0.8, 34, 8.0, 32, 4), 0.0),
        (Training(0.85, 24, 8.0, 32, 4, has_settings=True), 0.0),
        (Training(0.85, 24, 8.0, 32, 4, has_settings=True), 0.1),
        (Training(0.9, 40, 6.0, 64, 8, has_settings=True), 0.08),
        (Training(0.75, 30, 10.0, 48, 48, has_settings=True), 0.0),
    ],
    ids=str,
)
def test_the_whole_batch_is_run_where_its_gradients_take_no_room(
    training: Training, cast: float
) -> None:
    """Where smaller micro-batches run out of memory, since gradients are held beside them."""
    gradual = replace(training, gradients=GRADIENTS, cast=cast, temporaries=0.0)
    result = gradual.searched()
    assert result.best.plan.accumulation_steps == 1
    assert gradual.speed(result.best.plan) >= 0.9 * gradual.best_speed()
    assert result.search.probes <= 15


def _holding(
    number: int,
    plan: Plan,
    held_gib: float,
    resident_gib: float | None = None,
    gradients_gib: float | None = None,
) -> Trial:
    """A trial of a plan that held so much."""
    return make_trial(
        number,
        plan,
        step_times_s=[0.01] * 3,
        peak_allocated_bytes=round(held_gib * GIB),
        peak_reserved_bytes=round(held_gib * GIB),
        non_torch_bytes=0,
        resident_bytes=None if resident_gib is None else round(resident_gib * GIB),
        gradient_bytes=None if gradients_gib is None else round(gradients_gib * GIB),
    )


@pytest.mark.parametrize(("gradients", "largest"), [(None, 7), (0, 7), (0.45, 32)])
def test_what_runs_out_of_memory_beside_gradients_bounds_no_step_without(
    gradients: float | None, largest: int
) -> None:
    spec = SearchSpec(Space(DIMENSIONS, 4, global_batch=32), GIB)
    plain = spec.space.default_settings
    first = _holding(0, spec.space.plan(4, plain), 0.95, 0.9, gradients)
    beliefs = Beliefs(spec, [first, make_trial(1, spec.space.plan(8, plain), Outcome.OOM)])
    assert int(beliefs.largest_at(0.5)[0]) <= largest
    assert (int(beliefs.largest_at(0.5)[0]) == 32) is (largest == 32)
    assert beliefs.bound_at(0, 8) == 7


def test_a_whole_batch_that_ran_out_of_memory_tells_no_more_than_the_budget() -> None:
    """Its gradients may be there while most activations are, as where late layers are wide."""
    spec = SearchSpec(Space({}, 20, global_batch=60, ranks=3), round(8.7 * GIB))
    failed = make_trial(0, spec.space.plan(20, {}), Outcome.OOM)
    known, unknown = (
        Beliefs(
            spec,
            [failed, _holding(1, spec.space.plan(5, {}), 8.43, 8, gradients)],
        ).oom_risk(spec.space.plan(7, {}))
        for gradients in (2, None)
    )
    assert known == pytest.approx(unknown)


def test_a_whole_batch_that_ran_out_of_memory_bounds_every_plan() -> None:
    spec = SearchSpec(Space(DIMENSIONS, 4, global_batch=32), GIB)
    plain = spec.space.default_settings
    first = _holding(0, spec.space.plan(4, plain), 0.5, gradients_gib=0.25)
    beliefs = Beliefs(spec, [first, make_trial(1, spec.space.plan(32, plain), Outcome.OOM)])
    assert beliefs.bound_at(0, 32) == beliefs.bound_at(0, 16) == 31


def test_what_is_resident_is_no_samples_and_is_measured_for_a_variant_that_holds_less() -> None:
    spec = SearchSpec(Space({"optimizer.state": Dimension(("default", "8bit"))}, 1), GIB)
    plain, lean = spec.space.baseline, Plan(1, settings={"optimizer.state": "8bit"})
    first = _holding(0, plain, 0.85, 0.8)
    known, unknown = (Beliefs(spec, [each]) for each in (first, _holding(0, plain, 0.85)))
    assert known.held.lines.coefficients[0, 0] >= math.log(0.76 * GIB)
    assert known.held.limits(0.5)[0] >= 2
    assert known.held.limits(0.5)[0] > unknown.held.limits(0.5)[0]
    after = Beliefs(spec, [first, _holding(1, lean, 0.45, 0.4)])
    assert after.held.quantile(lean) == pytest.approx(0.45 * GIB, rel=0.05)
    assert after.held.lines.coefficients[0, 1] < math.log(0.5 * GIB)


def test_the_baselines_oom_makes_no_further_one_dearer() -> None:
    spec, fits = SearchSpec(Space({}, 64), GIB), _holding(1, Plan(8), 0.5)
    alone, after, chosen = (
        Beliefs(spec, trials).oom_cost(np.array([0.1]))
        for trials in (
            [fits],
            [make_trial(0, Plan(64), Outcome.OOM), fits],
            [fits, make_trial(2, Plan(64), Outcome.OOM)],
        )
    )
    assert after == alone
    assert chosen > alone
