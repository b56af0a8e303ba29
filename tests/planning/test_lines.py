"""Lines in closed form: what readings tell of them, beside numerical integration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from autofit.plan import Dimension, Scalar
from autofit.planning.constants import MEMORY_PRIOR, TIME_PRIOR, LinePrior
from autofit.planning.lines import Line, LineFamily, Lines, Reading
from autofit.space import Space

ONE = np.array([0])


def _family(
    dimensions: Mapping[str, Dimension] | None = None,
    prior: LinePrior = TIME_PRIOR,
    *,
    hints: Mapping[tuple[str, Scalar], float] | None = None,
    lines: Mapping[int, Line] | None = None,
) -> LineFamily:
    space = Space(dimensions or {}, 1)
    return LineFamily(
        list(space.variants()),
        space.dimensions,
        prior,
        slope_hints=hints or {},
        fixed_hints={},
        lines=lines or {},
    )


def _expected(lines: Lines, variant: int, size: float) -> float:
    return math.exp(float(lines.at(np.array([variant]), np.array([size])).mean[0]))


def _readings(line: Line, sizes: Sequence[int], variant: int = 0) -> list[Reading]:
    return [Reading(variant, x, math.log(line[0] + line[1] * x), 0.003) for x in sizes]


def test_what_is_fixed_and_what_grows_are_told_apart() -> None:
    lines = Lines(_family(), _readings((3.0, 0.2), (1, 4, 16, 64)), 0.001)
    fixed, slope = np.exp(lines.coefficients[:, 0])
    assert (fixed, slope) == pytest.approx((3.0, 0.2), rel=0.02)
    assert _expected(lines, 0, 200) == pytest.approx(43.0, rel=0.02)


def _integrated(readings: Sequence[Reading], at: float) -> tuple[float, float]:
    """Mean and deviation of the log at a size, by sums over a grid of log coefficients."""
    prior = _family().prior
    first = readings[0]
    start = first.log - math.log(2), first.log - math.log(2 * first.size)
    grid = np.linspace(-5, 5, 401)
    fixed, slope = np.meshgrid(start[0] + grid, start[1] + grid)
    deviation = math.hypot(prior.level, prior.own)
    log = -(((fixed - start[0]) / prior.level) ** 2) / 2 - ((slope - start[1]) / deviation) ** 2 / 2
    for reading in readings:
        line = np.logaddexp(fixed, slope + math.log(reading.size))
        z = (reading.log - line) / reading.error
        log -= z**2 / 2
    weights = np.exp(log - log.max())
    weights /= weights.sum()
    line = np.logaddexp(fixed, slope + math.log(at))
    mean = float((weights * line).sum())
    return mean, math.sqrt(float((weights * (line - mean) ** 2).sum()))


@pytest.mark.parametrize("sizes", [(1, 4), (2, 8, 32), (4, 5)])
def test_means_and_deviations_are_those_of_numerical_integration(sizes: tuple[int, ...]) -> None:
    """Of a line alone, that no plan departs from, to within what a normal can say."""
    readings = [Reading(0, x, math.log(2 + 0.5 * x), 0.02) for x in sizes]
    mean, deviation = _integrated(readings, 64.0)
    values = Lines(_family(), readings, 1e-6).at(ONE, np.array([64.0]))
    assert float(values.mean[0]) == pytest.approx(mean, abs=deviation / 2)
    assert math.sqrt(float(values.variance[0])) == pytest.approx(deviation, rel=0.5)


def test_a_bound_lifts_a_line_that_is_below_it_and_leaves_one_above() -> None:
    readings = [each._replace(error=0.05) for each in _readings((1.0, 0.5), (2, 4))]
    bound = Reading(0, 32.0, math.log(22.0), 0.01, at_least=True)
    alone, lifted, left = (
        _expected(Lines(_family(), [*readings, *bounds], 0.001), 0, 32)
        for bounds in ([], [bound], [bound._replace(log=math.log(10.0))])
    )
    assert alone == pytest.approx(17.0, rel=0.1)
    assert lifted == pytest.approx(22.0, rel=0.05)
    assert left == pytest.approx(alone)


PAIR = {
    "precision.dtype": Dimension(("default", "bfloat16")),
    "layout.format": Dimension(("default", "channels_last")),
}
"""Variants: plain, channels_last, bfloat16, both."""


def test_two_values_together_are_learned_apart_from_each() -> None:
    """channels_last is no faster alone, and twice as fast beside bfloat16."""
    family = _family(PAIR)
    seconds = {0: 1.0, 1: 1.05, 2: 0.6, 3: 0.3}
    readings = [
        Reading(v, x, math.log(0.001 + each * x), 0.003)
        for v, each in seconds.items()
        for x in (8, 32)
    ]
    lines = Lines(family, readings, 0.01)
    for variant, each in seconds.items():
        assert _expected(lines, variant, 64) == pytest.approx(64 * each, rel=0.05)
    without = Lines(_family(PAIR, replace(TIME_PRIOR, pair=0.0)), readings, 0.01)
    assert without.evidence < lines.evidence


def test_an_effect_of_a_value_carries_over_to_other_variants() -> None:
    before = Lines(_family(PAIR), _readings((0.1, 1.0), (8, 16)), 0.01)
    told = [*_readings((0.1, 1.0), (8, 16)), *_readings((0.1, 0.4), (8, 16), variant=2)]
    after = Lines(_family(PAIR), told, 0.01)
    assert _expected(after, 3, 16) < 0.8 * _expected(before, 3, 16)


def test_levels_between_predicted_ones_lie_between_them() -> None:
    dimensions = {"checkpointing.level": Dimension((0, 1, 2, 3, 4))}
    family = _family(dimensions, MEMORY_PRIOR, lines={0: (1.0, 8.0), 4: (1.0, 2.0)})
    slopes = np.exp(Lines(family, [], 0.003).coefficients[1])
    assert slopes[[0, 4]] == pytest.approx([8.0, 2.0])
    assert slopes[2] == pytest.approx(4.0)  # half-way in logarithms
    assert list(slopes) == sorted(slopes, reverse=True)


def test_hints_are_the_expectation_before_any_reading() -> None:
    family = _family(PAIR, hints={("precision.dtype", "bfloat16"): 0.5})
    slopes = np.exp(Lines(family, _readings((0.1, 1.0), (8, 16)), 0.01).coefficients[1])
    assert slopes[2] == pytest.approx(0.5, rel=0.05)


def test_differences_of_one_variant_are_surer_than_its_values() -> None:
    """What is shared cancels: variances of differences come from covariances."""
    lines = Lines(_family(PAIR), _readings((0.1, 1.0), (8,)), 0.02)
    one, two = (lines.at(np.array([3]), np.array([x])) for x in (30.0, 34.0))
    difference = float(one.variance[0] + two.variance[0] - 2 * one.covariance(two)[0])
    assert 0 <= difference < 0.1 * float(one.variance[0])
    assert one.covariance(one) == pytest.approx(one.variance)


def test_departures_at_a_size_are_shared_with_neighbours_and_other_variants() -> None:
    family = _family(PAIR)
    readings = [Reading(0, x, math.log(1.0 * x), 0.003) for x in (4, 8, 16)]
    odd = [Reading(0, 32, math.log(1.3 * 32), 0.003)]
    lines = Lines(family, [*readings, *odd], 0.1)
    expected = [_expected(lines, 0, x) / x for x in (32.0, 36.0, 400.0)]
    assert expected[0] > expected[1] > expected[2]
