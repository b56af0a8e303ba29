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

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autofit.plan import Dimension, Settings
from autofit.planning.least_squares import MANY, Array, Fitted, Readings, fit, nearest
from autofit.planning.line_prior import (
    Hints,
    LinePrior,
    Terms,
    log_effects,
    predicted_effects,
    shared_features,
)

MULTIPLES = (8, 4, 2)
"""Kernels may work in tiles of so many samples."""

_NEGLIGIBLE = 1e-9  # of the largest, for a singular value


@dataclass(frozen=True)
class Freedom:
    """How far lines may be from what their prior says, in some of the draws.

    Attributes:
        power: of the sum of fixed and growing parts; see `autofit.planning.least_squares.Readings`.
        uneven: standard deviation of the effect on log y of an x that is not a multiple of
            `MULTIPLES`, one for each.
        fixed: by how much the deviations of the settings' effects on intercepts are multiplied.
        interaction: likewise of interactions.
        spread: standard deviation of log y around the line, beside the error of each point.
    """

    power: float = 1.0
    uneven: float = 0.0
    fixed: float = 1.0
    interaction: float = 1.0
    spread: float = 0.0


_AS_THE_PRIOR = Freedom()


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
        power: (draws, 1), the norm by which intercept and slope add up; see `Readings`.
    """

    intercept: Array
    slope: Array
    uneven: Array
    power: Array

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
        total = fixed + growing * np.exp(self.power * np.log(x))
        values: Array = np.log(total) / self.power + self.unevenness(x)
        return values

    @cached_property
    def _parts(self) -> tuple[Array, Array]:
        """(draws, variants): the two parts of y at x = 1, to the power of their norm."""
        return np.exp(self.power * self.intercept), np.exp(self.power * self.slope)

    def unevenness(self, x: Array) -> Array:
        """Return (draws, n): the effect on log y of x's not being multiples.

        Args:
            x: (n), the same in all draws, or (draws or 1, n).
        """
        if not self.uneven.any():
            return np.zeros(1)
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
        self._predicted = bool(lines)
        terms = [
            Terms.of_setting(
                dimension.values,
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
        self, points: Sequence[Point], count: int, seed: int, freedom: Freedom = _AS_THE_PRIOR
    ) -> LineDraws:
        """Return `count` draws given the points; the same for the same arguments."""
        return self.mixed_draws(points, [(freedom, count, seed)])

    def mixed_draws(
        self, points: Sequence[Point], parts: Sequence[tuple[Freedom, int, int]]
    ) -> LineDraws:
        """Return draws given the points, in parts of so much freedom, so many, from such a seed."""
        shared, of_a, of_b = 2, self._of_a.shape[1], self._of_b.shape[1]
        sizes = [shared + of_a + of_b, self._count, len(points), len(MULTIPLES)]
        streams = [(np.random.default_rng(seed), count) for _, count, seed in parts]
        drawn = [[random.standard_normal((count, n)) for n in sizes] for random, count in streams]
        weights, interactions, errors, uneven = map(np.vstack, zip(*drawn, strict=True))
        freedoms = [freedom for freedom, count, _ in parts for _ in range(count)]
        mean_a, mean_b = self._means(points)
        parts = [part for part in parts if part[1]]
        if points:
            problem = _Problem(self, points, freedoms)
            seen = problem.seen
            prior = np.hstack(
                [problem.reduced(weights), interactions[:, seen], uneven[:, : problem.uneven]]
            )
            start = None
            if len(points) >= MANY:
                start = problem.likeliest([count for _, count, _ in parts])
            found = nearest(prior, problem.readings, errors[:, problem.order], start)
            terms = prior.shape[1] - len(seen) - problem.uneven
            weights = weights + problem.restored(found[:, :terms] - prior[:, :terms])
            interactions[:, seen] = found[:, terms : terms + len(seen)]
            uneven[:, : problem.uneven] = found[:, terms + len(seen) :]
        shifts, on_a, on_b = np.split(weights, [shared, shared + of_a], axis=1)
        fixed, interaction, deviation, power = _columns(
            freedoms, "fixed", "interaction", "uneven", "power"
        )
        return LineDraws(
            mean_a + shifts @ self._shared[0].T + fixed * on_a @ self._of_a.T,
            mean_b
            + shifts @ self._shared[1].T
            + on_b @ self._of_b.T
            + self._interaction * interaction * interactions,
            deviation * uneven,
            power,
        )

    def fits(
        self, points: Sequence[Point], freedoms: Sequence[Freedom]
    ) -> Callable[[Sequence[float], Fitted | None], Fitted]:
        """Return a function of the spread around the lines of each freedom.

        It returns the likeliest lines, and how well the family explains the points, whose order its
        readings have; from what it returned for similar spreads it gets there sooner.
        """
        problem = _Problem(self, points, freedoms)

        def fitted(spreads: Sequence[float], similar: Fitted | None) -> Fitted:
            readings = problem.with_spreads(np.array(spreads)[:, None])
            found = fit(readings, None if similar is None else similar.weights)
            log_y = np.empty_like(found.log_y)
            log_y[:, problem.order] = found.log_y
            return replace(found, log_y=log_y)

        return fitted

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


class _Problem:
    """The least-squares problem of a family and points, sorted by variant, in as few weights as
    make a difference to the variants seen.

    Attributes:
        order: of the points, that sorts them.
        seen: the variants that have points.
        uneven: how many weights of `MULTIPLES` there are.
        readings: the problem.
    """

    def __init__(
        self, family: LineFamily, points: Sequence[Point], freedoms: Sequence[Freedom]
    ) -> None:
        variants = np.array([point.variant for point in points])
        self.order = np.argsort(variants, kind="stable")
        self.seen, starts = np.unique(variants[self.order], return_index=True)
        fixed, interaction, uneven, spread, power = _columns(
            freedoms, "fixed", "interaction", "uneven", "spread", "power"
        )
        self.uneven = len(MULTIPLES) if uneven.any() else 0
        (of_a, self._of_a), (of_b, self._of_b) = (
            _essential(features[self.seen]) for features in (family._of_a, family._of_b)
        )
        shared_a, shared_b = (shared[self.seen] for shared in family._shared)
        ones = np.ones((len(freedoms), 1))
        mean_a, mean_b = family._means(points)
        x = np.array([point.x for point in points])[self.order]
        self._errors = np.array([point.error for point in points])[self.order]
        self.readings = Readings(
            starts=starts,
            log_x=np.log(x),
            log_y=np.log([point.y for point in points])[self.order],
            at_least=np.array([point.at_least for point in points])[self.order],
            precision=1 / (self._errors**2 + spread**2),
            mean_a=mean_a[self.seen],
            mean_b=mean_b[self.seen],
            features_a=np.hstack([of_a, shared_a, np.zeros_like(of_b)]),
            features_b=np.hstack([np.zeros_like(of_a), shared_b, of_b]),
            features_y=uneven_features(x)[:, : self.uneven],
            scale=np.hstack(
                [
                    np.tile(fixed, of_a.shape[1]),
                    np.tile(ones, shared_a.shape[1] + of_b.shape[1]),
                    np.tile(family._interaction * interaction, len(self.seen)),
                    np.tile(uneven, self.uneven),
                ]
            ),
            power=power,
        )

    def with_spreads(self, spreads: Array) -> Readings:
        """Return the readings with these deviations around the lines, (draws, 1)."""
        return replace(self.readings, precision=1 / (self._errors**2 + spreads**2))

    def likeliest(self, counts: Sequence[int]) -> Array:
        """Return (draws, weights): the likeliest, for parts of so many draws of equal freedom."""
        few = self.readings.of(np.cumsum([0, *counts[:-1]]))
        return np.repeat(fit(few).weights, counts, axis=0)

    def reduced(self, weights: Array) -> Array:
        """Return the weights of the problem from all terms' weights, (draws, terms)."""
        shared, on_a, on_b = np.split(weights, [2, 2 + self._of_a.shape[1]], axis=1)
        return np.hstack([on_a @ self._of_a.T, shared, on_b @ self._of_b.T])

    def restored(self, change: Array) -> Array:
        """Return the least change of all terms' weights that changes the problem's weights so."""
        of_a = len(self._of_a)
        on_a, shared, on_b = np.split(change, [of_a, of_a + 2], axis=1)
        return np.hstack([shared, on_a @ self._of_a, on_b @ self._of_b])


def _columns(freedoms: Sequence[Freedom], *names: str) -> list[Array]:
    """Return (draws, 1) of each of these attributes."""
    return [np.array([[getattr(freedom, name)] for freedom in freedoms]) for name in names]


def _essential(features: Array) -> tuple[Array, Array]:
    """Return features in as few orthonormal combinations of weights as span them, and these.

    Weights that are independent and standard normal are so in every orthonormal basis.
    """
    left, sizes, basis = np.linalg.svd(features, full_matrices=False)
    count = int((sizes > _NEGLIGIBLE * sizes.max(initial=0.0)).sum())
    return left[:, :count] * sizes[:count], basis[:count]
