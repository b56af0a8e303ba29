"""How far measured speeds stray: within a probe, and from probe to probe."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from autofit.measurement import (
    BETWEEN,
    Measurement,
    Noise,
    Outcome,
    Trial,
    TrialKind,
    median_error,
)
from autofit.plan import Plan


def _trial(
    number: int, middle: float, scatter: float, micro_batch: int | None = None, count: int = 3
) -> Trial:
    places = [-1.0, 0.0, 1.0] if count == 3 else [2 * k / (count - 1) - 1 for k in range(count)]
    times = [middle * math.exp(scatter * place) for place in places]
    plan = Plan(micro_batch or number + 1)
    return Trial(number, TrialKind.SEARCH, plan, Measurement(Outcome.OK, step_times_s=times))


@pytest.mark.parametrize("count", [3, 5, 9, 30])
def test_the_error_of_a_median_is_how_far_medians_differ(count: int) -> None:
    draw = random.Random(count)
    samples = [[math.exp(draw.gauss(0, 0.1)) for _ in range(count)] for _ in range(2000)]
    true = statistics.stdev(math.log(statistics.median(sample)) for sample in samples)
    believed = statistics.fmean(map(median_error, samples))
    assert believed == pytest.approx(true, rel=0.2)


def test_steps_that_others_interrupt_hardly_move_the_error_of_their_median() -> None:
    steps = [0.6e-3 * (1 + 0.001 * place) for place in range(30)]
    hit = [seconds + 5e-3 if place % 5 == 0 else seconds for place, seconds in enumerate(steps)]
    assert statistics.stdev(map(math.log, hit)) > 0.5
    assert median_error(hit) < 0.01
    assert median_error([1.0]) == 0.0


def test_repeats_that_differ_more_than_their_steps_raise_the_error() -> None:
    apart = [_trial(number, middle, 0.01, 4) for number, middle in enumerate((1.0, 1.1, 0.9))]
    noise = Noise(apart)
    assert [len(trials) for trials in noise.repeated] == [3]
    assert noise.of(apart[0]) > 0.05
    alike = [_trial(number, 1.0, 0.001, 4) for number in range(8)]
    assert Noise(alike).of(alike[0]) < 0.5 * BETWEEN
    assert Noise(alike).significant(alike) < Noise(apart).significant(apart)
