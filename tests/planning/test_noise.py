"""How much step times scatter from probe to probe."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Plan
from autofit.planning.departures import Noise, scatter_of_steps, seconds_of


def _trial(number: int, middle: float, scatter: float, micro_batch: int | None = None) -> Trial:
    times = [middle * math.exp(scatter * each) for each in (-1.0, 0.0, 1.0)]
    plan = Plan(micro_batch or number + 1)
    return Trial(number, Role.SEARCH, plan, Measurement(Outcome.OK, step_times_s=times))


def test_a_probe_scatters_as_those_of_similar_step_times_do() -> None:
    """Compared with the definition, probe by probe."""
    draw = random.Random(0)
    trials = [
        _trial(number, math.exp(draw.uniform(0, 2)), draw.uniform(0.001, 0.1))
        for number in range(60)
    ]
    noise = Noise(trials)
    for trial in trials:
        ratios = [(seconds_of(other) / seconds_of(trial), other) for other in trials]
        similar = [scatter_of_steps(other) for ratio, other in ratios if 1 / 1.5 < ratio < 1.5]
        expected = max(scatter_of_steps(trial), 0.002, statistics.median(similar))
        assert noise.of(trial) == pytest.approx(expected)


def test_steps_as_regular_as_clockwork_still_leave_a_little_noise() -> None:
    trial = _trial(0, 1.0, 0.0)
    assert Noise([trial]).of(trial) == 0.002


def test_repeats_that_differ_more_than_their_steps_raise_the_noise() -> None:
    apart = [_trial(number, middle, 0.01, 4) for number, middle in enumerate((1.0, 1.1, 0.9))]
    noise = Noise(apart)
    assert [len(trials) for trials in noise.repeated] == [3]
    assert noise.of(apart[0]) > 0.05
    alike = [_trial(number, 1.0, 0.01, 4) for number in range(8)]
    assert Noise(alike).of(alike[0]) < 0.5 * scatter_of_steps(alike[0])
