"""The memory line and the time line of every variant, fitted jointly to the measurements.

A variant holds `a + b * micro_batch` bytes and takes `alpha + beta * micro_batch` seconds per
micro-batch. Both are lines with positive coefficients, so one model serves for both:
log y = log(exp(A) + exp(B) * x), where A and B of a variant are sums of one term per setting, and B
has a small interaction term of the variant's own. Terms are shared: a measurement of one variant
informs every variant that has a setting in common with it. Hints and predicted lines are prior
means of the terms.

The posterior is represented by draws of all lines. A draw starts from a random draw of the prior
and moves to the nearest point that explains the measurements, each perturbed by a random draw of
its own error (randomize-then-optimize; Bardsley, Solonen, Haario and Laine, SIAM J. Sci. Comput.
36, 2014; `autofit.planning.least_squares`). A bound is a quantile over draws, and therefore wide
where little was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from autofit.plan import Dimension, Scalar, Settings, variant_key
from autofit.planning.least_squares import Array, Fitted, Readings, added, fit, nearest

MULTIPLES = (8, 4, 2)
"""Kernels may work in tiles of so many samples."""

Hints: TypeAlias = Mapping[tuple[str, Scalar], float]
"""(setting, value) -> expected ratio of a coefficient to that of the setting's first value."""


@dataclass(frozen=True)
class LinePrior:
    """Prior of a family of lines: standard deviations of log coefficients, unless stated otherwise.

    Attributes:
        level: of all lines together; wide, because the device may be anything.
        split: of how the first measured value divides between intercept and slope, each way.
        predicted_level: of the error of slopes that all predicted lines have in common.
        predicted_intercept: likewise of intercepts.
        intercept: of the effect of one value on the intercept.
        hinted_intercept: of the same effect around its hint.
        shared_slope: of the effect on the slope that all values of an unordered setting but the
            first have in common.
        slope: of the effect on the slope of one value alone.
        slope_mean: prior mean of the log slope of a non-plain value of an unordered setting;
            negative because strategies offer values that are expected to help.
        trend: of the effect on the slope of the last value of an ordered setting; the values
            before it have proportional shares of that effect.
        curvature: of the deviation of an ordered setting's values from that trend.
        hinted_slope: of the effect of a value on the slope around its hint.
        predicted_slope: of the same effect around its predicted line.
        own_share: more of the same where it is known: this share of the effect.
        common_share: likewise, in common to all values of the setting: who overrates one precision
            overrates the others.
        interaction: of a variant's slope around the product of its settings' effects.
        uneven: of the effect on y of an x that is not a multiple of `MULTIPLES`, one for each.
    """

    level: float = 2.0
    split: float = 1.0
    predicted_level: float = 0.05
    predicted_intercept: float = 0.1
    intercept: float = 0.05
    hinted_intercept: float = 0.15
    shared_slope: float = 0.5
    slope: float = 0.5
    slope_mean: float = -0.2
    trend: float = 0.6
    curvature: float = 0.4
    hinted_slope: float = 0.07
    predicted_slope: float = 0.03
    own_share: float = 0.0
    common_share: float = 0.0
    interaction: float = 0.06
    uneven: float = 0.0


@dataclass(frozen=True)
class Point:
    """One measured value of a line.

    Attributes:
        variant: index of the variant.
        x: micro-batch, in samples.
        y: bytes or seconds.
        error: standard deviation of log y from one probe to the next.
        at_least: whether y is only a lower bound, because the probe ran out of memory there.
    """

    variant: int
    x: float
    y: float
    error: float
    at_least: bool = False


@dataclass(frozen=True)
class LineDraws:
    """Draws of every variant's line.

    Attributes:
        intercept, slope: (draws, variants), their logarithms.
        uneven: (draws, multiples), the effect on log y of an x that is not such a multiple.
        power: (draws, 1), the norm by which intercept and slope add up; see `added`.
    """

    intercept: Array
    slope: Array
    uneven: Array
    power: Array

    @classmethod
    def joined(cls, parts: Sequence[LineDraws]) -> LineDraws:
        """Return all draws of several, one after the other."""
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("intercept", "slope", "uneven", "power")
            )
        )

    def value_at(self, x: Array | float) -> Array:
        """Return y at x, which is broadcast against (draws, variants)."""
        values: Array = np.exp(self.intercept) + np.exp(self.slope) * x
        return values

    def log_values_of(self, points: Sequence[Point]) -> Array:
        """Return (draws, points): log y of each point's variant at its x."""
        variants = [point.variant for point in points]
        x = np.array([point.x for point in points])
        a, b = self.intercept[:, variants], self.slope[:, variants] + np.log(x)
        values: Array = added(a, b, self.power) + self.unevenness(x)
        return values

    def unevenness(self, x: Array) -> Array:
        """Return (draws, n): the effect on log y of x's not being multiples.

        Args:
            x: (n), the same in all draws, or (draws or 1, n).
        """
        effect: Array = (self.uneven[:, None, :] * uneven_features(x)).sum(axis=-1)
        return effect

    def x_at(self, y: Array | float) -> Array:
        """Return the x at which each line equals y; below zero where the intercept is larger."""
        x: Array = (y - np.exp(self.intercept)) / np.exp(self.slope)
        return x


def uneven_features(x: Array) -> Array:
    """Return (..., multiples): 1 where x, rounded up, is not such a multiple."""
    features: Array = (np.ceil(x)[..., None] % np.array(MULTIPLES) > 0).astype(float)
    return features


class LineFamily:
    """The prior of all variants' lines, and draws from the posterior given measurements.

    Args:
        variants: the settings of each variant, the plain one first.
        dimensions: the settings' values; three or more growing numbers are an ordered setting.
        prior: the standard deviations.
        slope_hints: expected effects on the slope.
        intercept_hints: expected effects on the intercept.
        lines: variant index -> predicted (intercept, slope); empty, or the plain variant's and any
            others'. A missing line is composed: the plain line times the predicted or hinted
            effect of each setting on it.
    """

    def __init__(
        self,
        variants: Sequence[Settings],
        dimensions: Mapping[str, Dimension],
        prior: LinePrior,
        *,
        slope_hints: Hints | None = None,
        intercept_hints: Hints | None = None,
        lines: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        lines = lines or {}
        self._interaction, self._count = prior.interaction, len(variants)
        self._uneven = prior.uneven
        self._predicted = bool(lines)
        terms = [
            _Terms.of_setting(
                dimension.values,
                [settings[name] for settings in variants],
                prior,
                _log_effects(name, dimension, intercept_hints or {}),
                _log_effects(name, dimension, slope_hints or {}),
                _predicted_effects(name, dimension, variants, lines),
            )
            for name, dimension in dimensions.items()
        ]
        shared_a, shared_b = _shared_features(self._count, prior, self._predicted)
        intercepts, slopes = [t.features_a for t in terms], [t.features_b for t in terms]
        self._features_a = np.hstack([shared_a, *intercepts, *map(np.zeros_like, slopes)])
        self._features_b = np.hstack([shared_b, *map(np.zeros_like, intercepts), *slopes])
        plain = np.log(lines[0]) if lines else np.zeros(2)
        self._mean_a = np.full(self._count, plain[0])
        self._mean_b = np.full(self._count, plain[1])
        for term in terms:
            self._mean_a += term.mean_a
            self._mean_b += term.mean_b
        for index, line in lines.items():
            self._mean_a[index], self._mean_b[index] = np.log(line)

    def draws(
        self, points: Sequence[Point], count: int, seed: int, power: Array | float = 1.0
    ) -> LineDraws:
        """Return `count` draws given the points; the same for the same arguments.

        Args:
            points: what was measured.
            count: of draws.
            seed: of the draws.
            power: of each draw's norm, (count, 1), or of all; see `added`.
        """
        random = np.random.default_rng(seed)
        power = np.broadcast_to(power, (count, 1))
        mean_a, mean_b = self._means(points)
        weights = random.standard_normal((count, self._features_a.shape[1]))
        interactions = random.standard_normal((count, self._count))
        errors = random.standard_normal((count, len(points)))
        uneven = random.standard_normal((count, len(MULTIPLES)))
        if points:
            seen = np.unique([point.variant for point in points])
            prior = np.hstack([weights, interactions[:, seen], uneven])
            fitted = nearest(prior, self._readings(points, power), errors)
            ends = [weights.shape[1], weights.shape[1] + len(seen)]
            weights, interactions[:, seen], uneven = np.split(fitted, ends, axis=1)
        return LineDraws(
            mean_a + weights @ self._features_a.T,
            mean_b + weights @ self._features_b.T + self._interaction * interactions,
            self._uneven * uneven,
            power,
        )

    def fitted(self, points: Sequence[Point], power: float = 1.0) -> Fitted:
        """Return the likeliest lines at these points, and how well the family explains them."""
        return fit(self._readings(points, np.array([[power]])))

    def _readings(self, points: Sequence[Point], power: Array) -> Readings:
        """Return the problem whose weights are terms, interactions seen, and multiples."""
        variants = np.array([point.variant for point in points])
        mean_a, mean_b = self._means(points)
        own = self._interaction * (variants[:, None] == np.unique(variants))
        no_own, no_term = np.zeros_like(own), np.zeros((len(points), self._features_a.shape[1]))
        multiples = self._uneven * uneven_features(np.array([point.x for point in points]))
        no_multiple = np.zeros_like(multiples)
        return Readings(
            log_x=np.log([point.x for point in points]),
            log_y=np.log([point.y for point in points]),
            sd=np.array([point.error for point in points]),
            at_least=np.array([point.at_least for point in points]),
            mean_a=mean_a[variants],
            mean_b=mean_b[variants],
            features_a=np.hstack([self._features_a[variants], no_own, no_multiple]),
            features_b=np.hstack([self._features_b[variants], own, no_multiple]),
            features_y=np.hstack([no_term, no_own, multiples]),
            power=power,
        )

    def _means(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """Return prior means of A and B; without predicted lines, scaled by the first value.

        Half of the first value is then attributed to the slope.
        """
        if self._predicted or not points:
            return self._mean_a, self._mean_b
        first = next((p for p in points if not p.at_least), points[0])
        half = np.log(first.y / 2)
        at_first = self._mean_b[first.variant]
        return self._mean_a + half, self._mean_b - at_first + half - np.log(first.x)


def _shared_features(count: int, prior: LinePrior, predicted: bool) -> tuple[Array, Array]:
    """Return features for A and B of two terms of all variants.

    Of predicted lines one shifts the intercepts and one the slopes, else one shifts and one tilts.
    """
    ones, none = np.ones((count, 1)), np.zeros((count, 1))
    if predicted:
        shifts = prior.predicted_intercept * ones, prior.predicted_level * ones
        return np.hstack([shifts[0], none]), np.hstack([none, shifts[1]])
    level, split = prior.level * ones, prior.split * ones
    return np.hstack([level, split]), np.hstack([level, -split])


def _log_effects(name: str, dimension: Dimension, hints: Hints) -> dict[Scalar, float]:
    return {v: float(np.log(hints[name, v])) for v in dimension.values if (name, v) in hints}


def _predicted_effects(
    name: str,
    dimension: Dimension,
    variants: Sequence[Settings],
    lines: Mapping[int, tuple[float, float]],
) -> dict[Scalar, tuple[float, float]]:
    """Return log effects on (intercept, slope) of values with a predicted line."""
    found = {variant_key(variants[index]): np.log(line) for index, line in lines.items()}
    effects: dict[Scalar, tuple[float, float]] = {}
    for value in dimension.values[1:]:
        line = found.get(variant_key({**variants[0], name: value}))
        if line is not None:
            intercept, slope = line - np.log(lines[0])
            effects[value] = float(intercept), float(slope)
    return effects


@dataclass(frozen=True)
class _Terms:
    """The terms of one setting: prior means, (variants), and features, (variants, terms).

    A feature is the standard deviation of its term, because weights are standard normal.
    """

    mean_a: Array
    mean_b: Array
    features_a: Array
    features_b: Array

    @classmethod
    def of_setting(
        cls,
        values: Sequence[Scalar],
        by_variant: Sequence[Scalar],
        prior: LinePrior,
        intercept_hints: Mapping[Scalar, float],
        slope_hints: Mapping[Scalar, float],
        predicted: Mapping[Scalar, tuple[float, float]],
    ) -> _Terms:
        """Return the terms of a setting with these values; a prediction overrides a hint.

        Args:
            values: of the setting.
            by_variant: the value that each variant has.
            prior: the standard deviations.
            intercept_hints, slope_hints: value -> log effect.
            predicted: value -> log effects on intercept and slope.
        """
        rows = [values.index(value) for value in by_variant]
        intercepts = {**intercept_hints, **{v: both[0] for v, both in predicted.items()}}
        slopes = {**slope_hints, **{v: both[1] for v, both in predicted.items()}}
        is_ordered = _is_ordered(values)
        # Between predicted values of an ordered setting the effect is interpolated.
        known_between = bool(predicted) and is_ordered
        hinted = np.array([v in intercept_hints and v not in predicted for v in values])
        mean_a = _effects(values, intercepts, known_between)
        features_a = _one_each(np.where(hinted, prior.hinted_intercept, prior.intercept))
        if slopes:
            known = np.array([value in slopes for value in values])
            mean_b = _effects(values, slopes, known_between)
            is_predicted = np.array([value in predicted for value in values])
            around = np.where(is_predicted, prior.predicted_slope, prior.hinted_slope)
            around = np.hypot(around, prior.own_share * mean_b)
            own = _one_each(np.where(known, around, prior.slope))
            features_b = np.hstack([prior.common_share * mean_b[:, None], own])
        elif is_ordered:
            mean_b, features_b = np.zeros(len(values)), _trend_features(len(values), prior)
        else:
            is_changed = (np.arange(len(values)) > 0)[:, None]
            mean_b = np.where(is_changed[:, 0], prior.slope_mean, 0.0)
            own = _one_each(np.full(len(values), prior.slope))
            features_b = np.hstack([prior.shared_slope * is_changed, own])
        return cls(mean_a[rows], mean_b[rows], features_a[rows], features_b[rows])


def _effects(values: Sequence[Scalar], known: Mapping[Scalar, float], between: bool) -> Array:
    """Return the log effect of each value; unknown ones are 0, or interpolated if `between`."""
    if not between:
        return np.array([known.get(value, 0.0) for value in values])
    points = {values[0]: 0.0, **known}
    at = sorted(points, key=values.index)
    effects: Array = np.interp(
        range(len(values)), [values.index(value) for value in at], [points[value] for value in at]
    )
    return effects


def _one_each(deviations: Array) -> Array:
    """Return (values, values - 1): an independent term for each value but the first."""
    features: Array = np.diag(deviations)[:, 1:]
    return features


def _trend_features(count: int, prior: LinePrior) -> Array:
    """Return (values, values): a straight trend, and a random walk around it."""
    last, index = count - 1, np.arange(count)[:, None]
    steps = (np.arange(1, count) <= index) * prior.curvature / np.sqrt(last)
    return np.hstack([prior.trend * index / last, steps])


def _is_ordered(values: Sequence[Scalar]) -> bool:
    """Return whether neighbouring values can be expected to have similar effects."""
    if len(values) < 3 or any(isinstance(v, bool | str) for v in values):
        return False
    return list(values) == sorted(values, key=float)
