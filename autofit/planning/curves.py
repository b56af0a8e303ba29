"""The memory line and the time line of every variant, learned together from what was measured.

A variant holds `a + b * micro_batch` bytes and takes `alpha + beta * micro_batch` seconds for a
micro-batch. Both are lines with positive coefficients, so one family of curves serves for both:
log y = log(exp(A) + exp(B) * x), where A and B of a variant are sums of one term per setting, and B
has a small term of the variant's own. What was measured of one variant so tells about every
variant that shares a setting with it; hints and predicted lines are prior means of the terms.

What is known is kept as worlds: draws of all lines that agree with the measurements. A draw is the
point nearest to a random draw of the prior that explains the measurements, each moved by a random
draw of its own error (randomize-then-optimize; Bardsley, Solonen, Haario and Laine, SIAM J. Sci.
Comput. 36, 2014), found by `autofit.planning.curve_fit`. A bound is a quantile over worlds, and so
is wide where little was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autofit.plan import Dimension, Scalar, Settings, variant_key
from autofit.planning.curve_fit import Array, Readings, nearest

# What the values of one setting do to a variant's line: the terms that variants share.
#
# A term is a feature scaled by its standard deviation, around a prior mean that hints and predicted
# lines move. The values of an ordered setting follow a trend and stray from it step by step; those
# of an unordered one have a part in common and each its own.

Factors = tuple[float, float]
"""Logarithms of what a value does to intercept and slope."""


@dataclass(frozen=True)
class Spread:
    """How far the terms of a line may lie from their prior means, as standard deviations of logs.

    Attributes:
        level: of all values together; wide, since a device may be anything.
        split: of how the first value measured is split between intercept and slope, each way.
        predicted: of how far predicted lines are off, all together.
        intercept: of what one setting does to the intercept.
        common: of what all values of an unordered setting but the first do to the slope alike.
        slope: of what one of them does to the slope beside that.
        help: no deviation but the mean of what they do: values are offered because they may help.
        trend: of what the last value of an ordered setting does to the slope, as a straight trend.
        bend: of how far the values of an ordered setting stray from that trend.
        hinted: of what a value does to the slope, around its hint or its predicted line.
        own: of a variant's own slope around the product of its settings'.
    """

    level: float = 2.0
    split: float = 1.0
    predicted: float = 0.15
    intercept: float = 0.05
    common: float = 0.5
    slope: float = 0.5
    help: float = -0.2
    trend: float = 0.6
    bend: float = 0.4
    hinted: float = 0.07
    own: float = 0.06


def predicted_factors(
    name: str,
    dimension: Dimension,
    variants: Sequence[Settings],
    lines: Mapping[int, tuple[float, float]],
) -> dict[Scalar, Factors]:
    """By value, for those whose line beside plain values was predicted."""
    found = {variant_key(variants[index]): np.log(line) for index, line in lines.items()}
    factors: dict[Scalar, Factors] = {}
    for value in dimension.values[1:]:
        line = found.get(variant_key({**variants[0], name: value}))
        if line is not None:
            intercept, slope = line - np.log(lines[0])
            factors[value] = float(intercept), float(slope)
    return factors


class Terms:
    """What the values of one setting contribute to slopes and intercepts."""

    def __init__(
        self,
        name: str,
        dimension: Dimension,
        spread: Spread,
        hints: Mapping[tuple[str, Scalar], float],
        predicted: Mapping[Scalar, Factors],
    ) -> None:
        self._name, self._values, self._spread = name, list(dimension.values), spread
        self._hints = {v: float(np.log(hints[name, v])) for v in self._values if (name, v) in hints}
        self._hints |= {value: slope for value, (_, slope) in predicted.items()}
        self._predicted = predicted

    def intercept_means(self, variants: Sequence[Settings]) -> Array:
        """The predicted part of each variant's log intercept."""
        means = {value: intercept for value, (intercept, _) in self._predicted.items()}
        return self._rows(variants, lambda i: self._between(self._values[i], means))

    def slope_means(self, variants: Sequence[Settings]) -> Array:
        """The hinted and predicted part of each variant's log slope."""
        return self._rows(variants, lambda i: self._slope_mean(self._values[i]))

    def _slope_mean(self, value: Scalar) -> float:
        if self._hints:
            return self._between(value, self._hints)
        if _ordered(self._values) or value == self._values[0]:
            return 0.0
        return self._spread.help

    def _between(self, value: Scalar, known: Mapping[Scalar, float]) -> float:
        """What is known of a value; of ordered ones, between those that were predicted too."""
        if value in known or not (self._predicted and _ordered(self._values)):
            return known.get(value, 0.0)
        points = {self._values[0]: 0.0, **known}
        at = sorted(points, key=self._values.index)
        places = [self._values.index(each) for each in at]
        return float(np.interp(self._values.index(value), places, [points[each] for each in at]))

    def slope_features(self, variants: Sequence[Settings]) -> Array:
        """(variants, terms): the terms' standard deviations, where a variant has them."""
        return self._rows(variants, self._slope_row)

    def intercept_features(self, variants: Sequence[Settings]) -> Array:
        """Likewise for the intercept."""
        return self._rows(variants, lambda i: self._spread.intercept * self._own_column(i))

    def _rows(self, variants: Sequence[Settings], row: Callable[[int], Array | float]) -> Array:
        rows: Array = np.array([row(i) for i in range(len(self._values))])[self._where(variants)]
        return rows

    def _where(self, variants: Sequence[Settings]) -> list[int]:
        """Which value each variant has."""
        place = {value: index for index, value in enumerate(self._values)}
        return [place[settings[self._name]] for settings in variants]

    def _own_column(self, index: int) -> Array:
        """One column per value but the first."""
        column: Array = np.eye(len(self._values))[index][1:]
        return column

    def _slope_row(self, index: int) -> Array:
        if self._hints:
            hinted = self._values[index] in self._hints
            return (self._spread.hinted if hinted else self._spread.slope) * self._own_column(index)
        if not _ordered(self._values):
            own = self._spread.slope * self._own_column(index)
            return np.concatenate([[self._spread.common * (index > 0)], own])
        last = len(self._values) - 1
        steps = (np.arange(1, last + 1) <= index) * self._spread.bend / np.sqrt(last)
        return np.concatenate([[self._spread.trend * index / last], steps])


def _ordered(values: Sequence[Scalar]) -> bool:
    """Whether neighbouring values may be expected to do alike: three or more growing numbers."""
    if len(values) < 3 or any(isinstance(v, bool | str) for v in values):
        return False
    return list(values) == sorted(values, key=float)


@dataclass(frozen=True)
class Point:
    """One measured value of a line.

    Attributes:
        variant: which variant, as an index.
        x: micro-batch.
        y: bytes or seconds.
        error: standard deviation of log y from one probe to the next.
        at_least: y is only known to be this or more: it ran out of memory there.
    """

    variant: int
    x: float
    y: float
    error: float
    at_least: bool = False


@dataclass(frozen=True)
class Worlds:
    """Draws of every variant's line; both arrays are (worlds, variants), of logarithms."""

    intercept: Array
    slope: Array

    def value(self, x: Array | float) -> Array:
        """The lines at x, which is broadcast against (worlds, variants)."""
        values: Array = np.exp(self.intercept) + np.exp(self.slope) * x
        return values

    def reach(self, y: Array | float) -> Array:
        """The x at which each line reaches y; below zero where the intercept alone is larger."""
        x: Array = (y - np.exp(self.intercept)) / np.exp(self.slope)
        return x


class LineFamily:
    """The prior of all variants' lines, and the worlds that measurements leave of it.

    Args:
        variants: the settings of each variant, the plain one first.
        dimensions: the settings' values, which say what is ordered.
        spread: how far terms may lie from their prior means.
        hints: (setting, value) -> expected factor on the slope, relative to the first value.
        lines: variant index -> (intercept, slope) as predicted without running it; either none or
            the plain variant's and any others'. One that has none is composed: the plain line
            times what each of its settings does to the plain one, as predicted or hinted.
    """

    def __init__(
        self,
        variants: Sequence[Settings],
        dimensions: Mapping[str, Dimension],
        spread: Spread,
        hints: Mapping[tuple[str, Scalar], float],
        lines: Mapping[int, tuple[float, float]],
    ) -> None:
        self._own, self._count = spread.own, len(variants)
        self._predicted = bool(lines)
        terms = [
            Terms(name, d, spread, hints, predicted_factors(name, d, variants, lines))
            for name, d in dimensions.items()
        ]
        shared = _shared_features(self._count, spread, self._predicted)
        intercepts = [term.intercept_features(variants) for term in terms]
        slopes = [term.slope_features(variants) for term in terms]
        self._features_a = np.hstack([shared[0], *intercepts, *map(np.zeros_like, slopes)])
        self._features_b = np.hstack([shared[1], *map(np.zeros_like, intercepts), *slopes])
        plain = np.log(lines[0]) if lines else np.zeros(2)
        self._mean_a = np.full(self._count, plain[0])
        self._mean_b = np.full(self._count, plain[1])
        for term in terms:
            self._mean_a += term.intercept_means(variants)
            self._mean_b += term.slope_means(variants)
        for index, (intercept, slope) in lines.items():
            self._mean_a[index], self._mean_b[index] = np.log([intercept, slope])

    def worlds(self, points: Sequence[Point], count: int, seed: int) -> Worlds:
        """That many draws which agree with the points; the same for the same arguments."""
        random = np.random.default_rng(seed)
        mean_a, mean_b = self._means(points)
        weights = random.standard_normal((count, self._features_a.shape[1]))
        own = random.standard_normal((count, self._count))
        errors = random.standard_normal((count, len(points)))
        if points:
            variants = np.array([point.variant for point in points])
            seen = np.unique(variants)
            its_own = self._own * (variants[:, None] == seen)
            readings = Readings(
                log_x=np.log([point.x for point in points]),
                log_y=np.log([point.y for point in points]),
                sd=np.array([point.error for point in points]),
                at_least=np.array([point.at_least for point in points]),
                mean_a=mean_a[variants],
                mean_b=mean_b[variants],
                features_a=np.hstack([self._features_a[variants], np.zeros_like(its_own)]),
                features_b=np.hstack([self._features_b[variants], its_own]),
            )
            fitted = nearest(np.hstack([weights, own[:, seen]]), readings, errors)
            weights, own[:, seen] = np.split(fitted, [weights.shape[1]], axis=1)
        return Worlds(
            mean_a + weights @ self._features_a.T,
            mean_b + weights @ self._features_b.T + self._own * own,
        )

    def _means(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """Prior means; unless lines are predicted, half of the first value is from the slope."""
        if self._predicted or not points:
            return self._mean_a, self._mean_b
        first = next((p for p in points if not p.at_least), points[0])
        half = np.log(first.y / 2)
        at_first = self._mean_b[first.variant]
        return self._mean_a + half, self._mean_b - at_first + half - np.log(first.x)


def _shared_features(count: int, spread: Spread, predicted: bool) -> tuple[Array, Array]:
    """Terms of all variants: one moves the whole line, one tilts it."""
    level, split = (
        (spread.predicted, spread.predicted) if predicted else (spread.level, spread.split)
    )
    ones = np.ones((count, 1))
    return np.hstack([level * ones, split * ones]), np.hstack([level * ones, -split * ones])
