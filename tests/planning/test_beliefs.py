"""The beliefs: which measurements it uses, and how far it believes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autofit.measurement import Outcome
from autofit.plan import Plan, Settings
from autofit.planning.beliefs import Beliefs
from autofit.units import GIB
from tests.simulated import (
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


def _timed(device: SimulatedDevice, seconds: Callable[[int], float]) -> Beliefs:
    """The beliefs after the plain variant took so many seconds at some sizes."""
    sizes = (4, 8, 13, 16, 24, 30, 32, 37)
    trials = [
        make_trial(
            number,
            Plan(size, settings=PLAIN),
            step_times_s=[factor * seconds(size) for factor in (0.998, 1.0, 1.002)],
            peak_reserved_bytes=2 * GIB,
        )
        for number, size in enumerate(sizes)
    ]
    return Beliefs(device.spec(), trials)


def _log_speed(beliefs: Beliefs, settings: Settings, size: int) -> float:
    return beliefs.mean_log_speed(Plan(size, settings=settings))


def test_fixed_and_growing_time_add_up(device: SimulatedDevice) -> None:
    """A step of 10 samples has as much of the one as of the other."""
    beliefs = _timed(device, lambda n: 0.1 + 0.01 * n)
    assert _log_speed(beliefs, PLAIN, 10) == pytest.approx(np.log(10 / 0.2), abs=0.02)
