"""The memory line and the time line of every variant, learned together from what was measured.

A variant holds `a + b * micro_batch` bytes and takes `alpha + beta * micro_batch` seconds for a
micro-batch. Both are lines with positive coefficients, so one family of curves serves for both:
log y = log(exp(A) + exp(B) * x), where A and B of a variant are sums of one term per setting, and B
has a small term of the variant's own. What was measured of one variant so tells about every
variant that shares a setting with it; hints and predicted lines are prior means of the terms.

What is known is kept as worlds: draws of all lines that agree with the measurements. A draw is the
point nearest to a random draw of the prior that explains the measurements, each moved by a random
draw of its own error (randomize-then-optimize; Bardsley, Solonen, Haario and Laine, SIAM J. Sci.
Comput. 36, 2014), found by `autofit.curve_fit`. A bound is a quantile over worlds, and so is wide
where little was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autofit.curve_fit import Array as Array
from autofit.curve_fit import Readings, nearest
from autofit.curve_terms import Spread as Spread
from autofit.curve_terms import Terms, predicted_factors
from autofit.plan import Dimension, Scalar, Settings


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
