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

A step time need not be a line: launches set a floor, a cache or another kernel makes it jump, some
sizes suit a kernel better than others. Its log is therefore a line plus a departure that changes in
steps: between two measured sizes it jumps from the one's to the other's, nobody knows where. A
probe halfway is therefore as likely to be as good as the better of the two as it is to be as bad as
the worse, which is what makes it worth a try. Beyond the sizes that a variant ran, its departure
changes as those of the other variants do, or not at all: they launch similar kernels on the same
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autofit.plan import Dimension, Scalar, Settings, variant_key
from autofit.planning.constants import (
    ALIKE,
    BEYOND,
    LEAST_GROWING,
    LEAST_SPREAD,
    MANY_READINGS,
    SURE,
    TINY,
    LinePrior,
)
from autofit.planning.least_squares import Array, Readings, likeliest, nearest

# (setting, value) -> expected ratio of a coefficient to that of the setting's first value.
Hints: TypeAlias = Mapping[tuple[str, Scalar], float]


@dataclass(frozen=True)
class Point:
    """One measured value of a line.

    Attributes:
        variant: index of the variant.
        x: micro-batch, in samples; 0: of the intercept alone.
        y: bytes or seconds.
        error: standard deviation of log y from one probe to the next.
        at_least: whether y is only a lower bound, because the probe ran out of memory there or
            because it is only a part of what is fixed.
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
    """

    intercept: Array
    slope: Array

    def value_at(self, x: Array | float) -> Array:
        """Return y at x, which is broadcast against (draws, variants)."""
        values: Array = np.exp(self.intercept) + np.exp(self.slope) * x
        return values

    def log_values_of(self, variants: NDArray[np.intp], x: Array) -> Array:
        """Return (draws, n): log y of these variants at these x.

        Args:
            variants: (n), of each.
            x: (n), the same in all draws, or (draws or 1, n).
        """
        fixed, growing = (each[:, variants] for each in self._parts)
        values: Array = np.log(fixed + growing * x)
        return values

    @cached_property
    def _parts(self) -> tuple[Array, Array]:
        """(draws, variants): the two parts of y at x = 1."""
        return np.exp(self.intercept), np.exp(self.slope)

    def x_at(self, y: Array | float) -> Array:
        """Return the x at which each line equals y; below zero where the intercept is larger."""
        x: Array = (y - np.exp(self.intercept)) / np.exp(self.slope)
        return x


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
        self._predicted = bool(lines)
        terms = [
            Terms.of_setting(
                dimension,
                [settings[name] for settings in variants],
                prior,
                log_effects(name, dimension, intercept_hints or {}),
                log_effects(name, dimension, slope_hints or {}),
                predicted_effects(name, dimension, variants, lines),
            )
            for name, dimension in dimensions.items()
        ]
        self._shared = shared_features(self._count, prior, self._predicted)
        none = np.zeros((self._count, 0))
        self._of_a = np.hstack([none, *(term.features_a for term in terms)])
        self._of_b = np.hstack([none, *(term.features_b for term in terms)])
        plain = np.log(lines[0]) if lines else np.zeros(2)
        self._mean_a = np.full(self._count, plain[0])
        self._mean_b = np.full(self._count, plain[1])
        for term in terms:
            self._mean_a += term.mean_a
            self._mean_b += term.mean_b
        for index, line in lines.items():
            self._mean_a[index], self._mean_b[index] = np.log(line)

    def among(self, few: NDArray[np.intp]) -> LineFamily:
        """Return the family of these variants alone."""
        family = copy(self)
        family._count = len(few)
        family._shared = self._shared[0][few], self._shared[1][few]
        family._of_a, family._of_b = self._of_a[few], self._of_b[few]
        family._mean_a, family._mean_b = self._mean_a[few], self._mean_b[few]
        return family

    def draws(
        self, points: Sequence[Point], count: int, seed: int, spread: float = 0.0
    ) -> LineDraws:
        """Return `count` draws given the points; the same for the same arguments.

        Args:
            points: the measured values.
            count: how many draws.
            seed: of the draws.
            spread: standard deviation of log y around the line, beside the error of each point.
        """
        shared, of_a, of_b = 2, self._of_a.shape[1], self._of_b.shape[1]
        random = np.random.default_rng(seed)
        sizes = shared + of_a + of_b, self._count, len(points)
        weights, interactions, errors = (random.standard_normal((count, n)) for n in sizes)
        if points:
            problem = _Problem(self, points, spread)
            prior = np.hstack([problem.reduced(weights), interactions[:, problem.seen]])
            start = None
            if len(points) >= MANY_READINGS:
                start = np.repeat(likeliest(problem.readings), count, axis=0)
            found = nearest(prior, problem.readings, errors[:, problem.order], start)
            terms = prior.shape[1] - len(problem.seen)
            weights = weights + problem.restored(found[:, :terms] - prior[:, :terms])
            interactions[:, problem.seen] = found[:, terms:]
        mean_a, mean_b = self._means(points)
        shifts, on_a, on_b = np.split(weights, [shared, shared + of_a], axis=1)
        return LineDraws(
            mean_a + shifts @ self._shared[0].T + on_a @ self._of_a.T,
            mean_b
            + shifts @ self._shared[1].T
            + on_b @ self._of_b.T
            + self._interaction * interactions,
        )

    def likeliest(self, points: Sequence[Point], spread: float) -> Array:
        """Return (points): log y there of the likeliest lines, of so much spread around them."""
        problem = _Problem(self, points, spread)
        log_y = np.empty(len(points))
        log_y[problem.order] = problem.readings.predicted(likeliest(problem.readings))[0][0]
        return log_y

    def _means(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """Return prior means of A and B; without predicted lines, scaled by the first value.

        Half of the first value is then attributed to the slope, of what is not known to be fixed.
        """
        sized = [point for point in points if point.x > 0]
        if self._predicted or not sized:
            return self._mean_a, self._mean_b
        first = next((p for p in sized if not p.at_least), sized[0])
        fixed = max((p.y for p in points if not p.x and p.variant == first.variant), default=0.0)
        growing = max(first.y - fixed, LEAST_GROWING * first.y) / 2
        at_first = self._mean_b[first.variant]
        return (
            self._mean_a + np.log(first.y - growing),
            self._mean_b - at_first + np.log(growing / first.x),
        )


class _Problem:
    """The least-squares problem of a family and points, sorted by variant, in as few weights as
    make a difference to the variants seen.

    Attributes:
        order: of the points, that sorts them.
        seen: the variants that have points.
        readings: the problem.
    """

    def __init__(self, family: LineFamily, points: Sequence[Point], spread: float) -> None:
        variants = np.array([point.variant for point in points])
        self.order = np.argsort(variants, kind="stable")
        self.seen, starts = np.unique(variants[self.order], return_index=True)
        (of_a, self._of_a), (of_b, self._of_b) = (
            _essential(features[self.seen]) for features in (family._of_a, family._of_b)
        )
        shared_a, shared_b = (shared[self.seen] for shared in family._shared)
        mean_a, mean_b = family._means(points)
        errors = np.array([point.error for point in points])[self.order]
        self.readings = Readings(
            starts=starts,
            x=np.array([point.x for point in points])[self.order],
            log_y=np.log([point.y for point in points])[self.order],
            at_least=np.array([point.at_least for point in points])[self.order],
            precision=1 / (errors**2 + spread**2),
            mean_a=mean_a[self.seen],
            mean_b=mean_b[self.seen],
            features_a=np.hstack([of_a, shared_a, np.zeros_like(of_b)]),
            features_b=np.hstack([np.zeros_like(of_a), shared_b, of_b]),
            own=family._interaction,
        )

    def reduced(self, weights: Array) -> Array:
        """Return the weights of the problem from all terms' weights, (draws, terms)."""
        shared, on_a, on_b = np.split(weights, [2, 2 + self._of_a.shape[1]], axis=1)
        return np.hstack([on_a @ self._of_a.T, shared, on_b @ self._of_b.T])

    def restored(self, change: Array) -> Array:
        """Return the least change of all terms' weights that changes the problem's weights so."""
        of_a = len(self._of_a)
        on_a, shared, on_b = np.split(change, [of_a, of_a + 2], axis=1)
        return np.hstack([shared, on_a @ self._of_a, on_b @ self._of_b])


def _essential(features: Array) -> tuple[Array, Array]:
    """Return features in as few orthonormal combinations of weights as span them, and these.

    Weights that are independent and standard normal are so in every orthonormal basis.
    """
    left, sizes, basis = np.linalg.svd(features, full_matrices=False)
    count = int((sizes > TINY * sizes.max(initial=0.0)).sum())
    return left[:, :count] * sizes[:count], basis[:count]


def shared_features(count: int, prior: LinePrior, predicted: bool) -> tuple[Array, Array]:
    """Return features for A and B of two terms of all variants.

    Of predicted lines one shifts the intercepts and one the slopes, else one shifts and one tilts.
    """
    ones, none = np.ones((count, 1)), np.zeros((count, 1))
    if predicted:
        shifts = prior.predicted_intercept * ones, prior.predicted_level * ones
        return np.hstack([shifts[0], none]), np.hstack([none, shifts[1]])
    level, split = prior.level * ones, prior.split * ones
    return np.hstack([level, split]), np.hstack([level, -split])


def log_effects(name: str, dimension: Dimension, hints: Hints) -> dict[Scalar, float]:
    return {v: float(np.log(hints[name, v])) for v in dimension.values if (name, v) in hints}


def predicted_effects(
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
class Terms:
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
        dimension: Dimension,
        by_variant: Sequence[Scalar],
        prior: LinePrior,
        intercept_hints: Mapping[Scalar, float],
        slope_hints: Mapping[Scalar, float],
        predicted: Mapping[Scalar, tuple[float, float]],
    ) -> Terms:
        """Return the terms of a setting; a prediction overrides a hint.

        Args:
            dimension: the setting's values.
            by_variant: the value that each variant has.
            prior: the standard deviations.
            intercept_hints, slope_hints: value -> log effect.
            predicted: value -> log effects on intercept and slope.
        """
        values, is_ordered = dimension.values, dimension.is_ordered
        rows = [values.index(value) for value in by_variant]
        intercepts = {**intercept_hints, **{v: both[0] for v, both in predicted.items()}}
        slopes = {**slope_hints, **{v: both[1] for v, both in predicted.items()}}
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


def spread_of(residuals: Array, noise: Array) -> float:
    """Return the standard deviation of departures that explains these residuals beyond noise.

    Args:
        residuals: (points), logs of measured over expected step times.
        noise: (points), their standard deviation where there is no departure.
    """
    if not len(residuals):
        return LEAST_SPREAD
    excess = (residuals**2 - noise**2).sum() - SURE * np.sqrt(2 * (noise**4).sum())
    return float(np.sqrt(max(LEAST_SPREAD**2, excess / len(residuals))))


class Departures:
    """Draws of the departures of every plan, given measured ones.

    Args:
        points: the measured step times, at least one.
        residuals: (draws, points), logs of measured over expected step times.
        spread: standard deviation of departures.
        variants: how many variants there are.
        seed: of the draws.
    """

    def __init__(
        self, points: Sequence[Point], residuals: Array, spread: float, variants: int, seed: int
    ) -> None:
        random = np.random.default_rng(seed)
        draws = len(residuals)
        self._jump = random.random((draws, variants))
        self._alike = random.random((draws, variants)) < ALIKE
        of, log_x = np.array([p.variant for p in points]), np.log([p.x for p in points])
        order = np.lexsort((log_x, of))
        of, log_x = of[order], log_x[order]
        is_first = np.append(True, (np.diff(of) > 0) | (np.diff(log_x) > 0))
        starts = np.flatnonzero(is_first)  # the first point of each plan
        weights = np.array([point.error for point in points])[order] ** -2
        precision = np.add.reduceat(weights, starts)[:, None] + spread**-2
        weighted = residuals.T[order] * weights[:, None]
        mean = np.add.reduceat(weighted, starts, axis=0) / precision
        drawn = mean + random.standard_normal(mean.shape) / np.sqrt(precision)
        of, log_x = of[starts], log_x[starts]
        # (variants): how many sizes each ran; (variants, most sizes): their logs, then `BEYOND`;
        # (variants, most sizes, draws): the departures there.
        self._count = np.bincount(of, minlength=variants)
        at = np.arange(len(of)) - np.repeat(np.cumsum(self._count) - self._count, self._count)
        self._sizes = np.full((variants, self._count.max()), BEYOND)
        self._sizes[of, at] = log_x
        self._values = np.zeros((*self._sizes.shape, draws))
        self._values[of, at] = drawn
        self._common_x, which = np.unique(log_x, return_inverse=True)
        self._common = np.bincount(which, drawn.mean(axis=1)) / np.bincount(which)

    def of(self, variants: NDArray[np.intp], log_x: Array) -> Array:
        """Return (draws, plans): departures of plans of these variants at these sizes.

        Args:
            variants: (plans), of each.
            log_x: (plans), or (draws or 1, plans), logs of their micro-batches.
        """
        count, sizes = self._count[variants], self._sizes[variants]
        plan, draw = np.arange(len(variants)), np.arange(len(self._jump))[:, None]
        last = np.maximum(count - 1, 0)
        after = (sizes < log_x[..., None]).sum(axis=-1)
        left, right = np.maximum(after - 1, 0), np.minimum(after, last)
        start = sizes[plan, left]
        width = sizes[plan, right] - start
        share = np.where(width > 0, (log_x - start) / np.where(width > 0, width, 1.0), 0.0)
        chosen = np.where(share > self._jump[:, variants], right, left)
        nearest = np.clip(log_x, sizes[:, 0], sizes[plan, last])
        seen = np.where(count > 0, np.interp(nearest, self._common_x, self._common), 0.0)
        change = np.interp(log_x, self._common_x, self._common) - seen
        departures: Array = self._values[variants, chosen, draw] + self._alike[:, variants] * change
        return departures
