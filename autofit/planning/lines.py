"""A Gaussian process over plans whose mean is a line over the micro-batch.

A micro-batch of x samples of variant v takes exp(A_v) + exp(B_v) x: fixed bytes or seconds, and
those of a sample. A and B are sums of independent effects: of the level of all lines, of each value
of each setting, of pairs of values (so that channels_last is learned to help beside bfloat16
alone), and of the variant itself. An ordered setting has effects that grow along its values. What a
plan departs from its line by is correlated over neighbouring sizes, and partly the same in all
variants. Every covariance is therefore a product of features, and the posterior has a closed form
around the likeliest lines, which a few Gauss-Newton steps find (Laplace's approximation: Rasmussen
and Williams, Gaussian Processes for Machine Learning, 2006, section 3.4). A probe that ran out of
memory is a reading that bounds its line from below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autofit.plan import Dimension, Scalar, Settings
from autofit.planning.constants import (
    ALIKE,
    CONVERGED,
    GAUSS_NEWTON_STEPS,
    INACTIVE,
    KNOWN_TREND,
    LENGTH,
    TINY,
    LinePrior,
)

Array: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]
Hints: TypeAlias = Mapping[tuple[str, Scalar], float]
"""(setting, value) -> factor beside the setting's first value."""
Line: TypeAlias = tuple[float, float]
"""What is fixed, and what each sample adds: bytes or seconds."""


class Reading(NamedTuple):
    """What a probe told of its line.

    Attributes:
        variant: its place among all.
        size: samples of a micro-batch.
        log: of bytes or of seconds.
        error: standard deviation of that log.
        at_least: whether it is only a lower bound.
    """

    variant: int
    size: float
    log: float
    error: float
    at_least: bool = False


class LineFamily:
    """What is believed of the lines of all variants before any reading.

    Args:
        variants: every one, the plain one first.
        dimensions: the settings.
        prior: the standard deviations.
        slope_hints, fixed_hints: expected effects on what a sample adds and on what is fixed.
        lines: predicted lines by variant, the plain one's among them; empty: none.

    Attributes:
        prior: as given.
        plain: logs of the plain variant's predicted line; None: unknown.
        mean: (2, variants), log A and log B beside the plain variant's.
        fixed, slope: (variants, effects), each effect's deviation times its part in A, and in B.
    """

    def __init__(
        self,
        variants: Sequence[Settings],
        dimensions: Mapping[str, Dimension],
        prior: LinePrior,
        *,
        slope_hints: Hints,
        fixed_hints: Hints,
        lines: Mapping[int, Line],
    ) -> None:
        self.prior = prior
        self.plain = _logs(lines[0]) if lines else None
        known = prior.level if self.plain is None else None
        self._columns = (
            [np.full(len(variants), known or prior.fixed_known)],
            [np.full(len(variants), known or prior.level_known)],
        )
        self.mean = np.zeros((2, len(variants)))
        values = {
            name: np.array([dimension.values.index(each[name]) for each in variants], dtype=np.intp)
            for name, dimension in dimensions.items()
        }
        predicted = _single_effects(values, lines)
        for name, dimension in dimensions.items():
            effects = [predicted.get((name, index)) for index in range(1, len(dimension.values))]
            if dimension.is_ordered:
                effects = _between(effects)
            hints = [
                (fixed_hints.get((name, value)), slope_hints.get((name, value)))
                for value in dimension.values[1:]
            ]
            self._add_values(values[name], effects, hints, is_ordered=dimension.is_ordered)
        self._add_pairs([values[n] for n, d in dimensions.items() if not d.is_ordered])
        self.fixed, self.slope = (np.array(columns).T for columns in self._columns)
        for index, line in lines.items():
            self.mean[:, index] = np.array(_logs(line)) - _logs(lines[0])

    def _add_values(
        self,
        at: Indices,
        predicted: Sequence[Line | None],
        hints: Sequence[tuple[float | None, float | None]],
        *,
        is_ordered: bool,
    ) -> None:
        """Add the effects of a setting's values; `at` has the place of each variant's value."""
        prior, (fixed, slope) = self.prior, self._columns
        for index, (line, hint) in enumerate(zip(predicted, hints, strict=True), start=1):
            has = at == index
            usual = 0.0 if is_ordered else prior.slope_mean
            fixed_hint, slope_hint = hint
            hinted = _log_or(fixed_hint, 0.0), _log_or(slope_hint, usual)
            self.mean += np.outer(line or hinted, has)
            fixed.append(prior.fixed * has)
            deviation = prior.slope if hint[1] is None else prior.hinted
            if not is_ordered:
                slope.append((deviation if line is None else prior.predicted) * has)
        if is_ordered:
            last = len(predicted)
            known = [
                line is not None or hint[1] is not None
                for line, hint in zip(predicted, hints, strict=True)
            ]
            share = KNOWN_TREND if all(known) else 1.0
            slope.append(share * prior.trend * at / last)
            walk = share * prior.trend / 2 / math.sqrt(last)
            slope.extend(walk * (at >= index) for index in range(1, last + 1))

    def _add_pairs(self, settings: Sequence[Indices]) -> None:
        """Add effects on the slope of every two values, of unordered settings, together."""
        for one, two in combinations(settings, 2):
            together = one * (two.max() + 1) + two
            pairs = np.unique(together[(one > 0) & (two > 0)])
            self._columns[1].extend(self.prior.pair * (together == pair) for pair in pairs)


def _between(effects: Sequence[Line | None]) -> list[Line | None]:
    """Return the effects of an ordered setting's values, those between known ones interpolated."""
    known = {0: (0.0, 0.0)} | {at: each for at, each in enumerate(effects, start=1) if each}
    found: list[Line | None] = [
        (
            float(np.interp(at, [*known], [fixed for fixed, _ in known.values()])),
            float(np.interp(at, [*known], [slope for _, slope in known.values()])),
        )
        for at in range(1, max(known) + 1)
    ]
    return found + [None] * (len(effects) - len(found))


def _log_or(hint: float | None, default: float) -> float:
    return default if hint is None else math.log(hint)


def _logs(line: Line) -> Line:
    return math.log(line[0]), math.log(line[1])


def _single_effects(
    values: Mapping[str, Indices], lines: Mapping[int, Line]
) -> dict[tuple[str, int], Line]:
    """Return the predicted effects on log A and log B of values that alone are not plain."""
    found: dict[tuple[str, int], Line] = {}
    for index, line in lines.items():
        changed = [(name, int(at[index])) for name, at in values.items() if at[index]]
        if len(changed) == 1:
            (fixed, slope), plain = _logs(line), _logs(lines[0])
            found[changed[0]] = fixed - plain[0], slope - plain[1]
    return found


class Lines:
    """The lines of a family after some readings.

    Args:
        family: what is believed before.
        readings: of probes.
        spread: standard deviation of the log by which a plan departs from its line.

    Attributes:
        evidence: log probability of the readings, up to a constant.
    """

    def __init__(self, family: LineFamily, readings: Sequence[Reading], spread: float) -> None:
        self.family, self.spread, self.evidence = family, spread, 0.0
        self.variants = np.array([reading.variant for reading in readings], dtype=np.intp)
        self._sizes, self._logs, self._errors = (
            np.array([getattr(reading, name) for reading in readings], dtype=np.float64)
            for name in ("size", "log", "error")
        )
        self._at_least = np.array([reading.at_least for reading in readings], dtype=np.bool_)
        self._mean = family.mean + self._level()[:, None]
        self._share, self._weights = np.zeros(len(readings)), np.zeros(len(readings))
        self.inverse: Array = np.zeros((len(readings), len(readings)))
        if readings:
            self._find_likeliest()

    def _level(self) -> Array:
        """Return log A and log B of the plain variant, as far as that is known before the fit."""
        plain, mean = self.family.plain, self.family.mean
        if not len(self.variants) or (plain is not None and not self.family.prior.is_relative):
            return np.array(plain or (0.0, 0.0))
        # An exact one of whole samples, if there is one
        first = int(np.argmin(2 * (self._sizes < 1) + self._at_least))
        log, log_size = self._logs[first], math.log(max(self._sizes[first], 1.0))
        fixed, slope = log - mean[:, self.variants[first]]
        half = math.log(2)  # without a prediction, each is half of the first reading
        return np.array([fixed - half, slope - log_size - (half if plain is None else 0.0)])

    def _find_likeliest(self) -> None:
        of, log_sizes = self.variants, np.log(self._sizes)
        features, own = (self.family.fixed[of], self.family.slope[of]), self.family.prior.own
        fixed_cov, slope_cov = (each @ each.T for each in features)
        slope_cov = slope_cov + own**2 * (of[:, None] == of)
        residual_cov = self._residual(of, self._sizes, of, self._sizes)
        start = self._mean[:, of]
        fixed, slope = start.copy()
        for step in range(GAUSS_NEWTON_STEPS):
            mean = np.logaddexp(fixed, slope + log_sizes)
            share = np.exp(fixed - mean)  # of what is fixed
            errors = np.where(~self._at_least | (mean < self._logs), self._errors, INACTIVE)
            covariance = _weighed(share, share, fixed_cov, slope_cov) + residual_cov
            covariance += np.diag(errors**2)
            ahead = share * (fixed - start[0]) + (1 - share) * (slope - start[1])
            target = self._logs - mean + ahead
            weights = np.linalg.solve(covariance, target)
            to_fixed = start[0] + fixed_cov @ (share * weights)
            to_slope = start[1] + slope_cov @ ((1 - share) * weights)
            move = max(np.abs(to_fixed - fixed).max(), np.abs(to_slope - slope).max())
            # No step longer than a factor of e, and shorter ones where steps go back and forth
            pace = min(1.0, 1.0 / max(move, TINY)) * (1.0 if step < GAUSS_NEWTON_STEPS / 3 else 0.5)
            fixed, slope = fixed + pace * (to_fixed - fixed), slope + pace * (to_slope - slope)
            if move < CONVERGED:
                break
        self._share, self._weights = share, weights
        self.inverse = np.asarray(np.linalg.inv(covariance))
        self.evidence = -0.5 * float(target @ weights + np.linalg.slogdet(covariance)[1])

    def _residual(self, variants: Indices, sizes: Array, others: Indices, of: Array) -> Array:
        far = np.abs(np.log(sizes)[:, None] - np.log(of))
        alike = ALIKE + (1 - ALIKE) * (variants[:, None] == others)
        covariance: Array = self.spread**2 * np.exp(-far / LENGTH) * alike
        return covariance

    @cached_property
    def coefficients(self) -> Array:
        """(2, variants): the likeliest log A and log B."""
        family, of, share = self.family, self.variants, self._share
        fixed = family.fixed @ (family.fixed[of].T @ (share * self._weights))
        slope = family.slope @ (family.slope[of].T @ ((1 - share) * self._weights))
        np.add.at(slope, of, family.prior.own**2 * (1 - share) * self._weights)
        coefficients: Array = self._mean + np.array([fixed, slope])
        return coefficients

    def at(self, variants: Indices, sizes: Array) -> LogValues:
        """Return what is believed of plans of these variants and micro-batches."""
        fixed, slope = self.coefficients[:, variants]
        mean = np.logaddexp(fixed, slope + np.log(sizes))
        share, family, of = np.exp(fixed - mean), self.family, self.variants
        residual = self._residual(variants, sizes, of, self._sizes)
        slope_cov = family.slope[variants] @ family.slope[of].T
        slope_cov += family.prior.own**2 * (variants[:, None] == of)
        to_readings = residual + _weighed(
            share, self._share, family.fixed[variants] @ family.fixed[of].T, slope_cov
        )
        mean = mean + residual @ self._weights
        return LogValues(self, variants, sizes, mean, share, to_readings)


def _weighed(share: Array, other: Array, fixed: Array, slope: Array) -> Array:
    weighed: Array = share[:, None] * other * fixed + (1 - share)[:, None] * (1 - other) * slope
    return weighed


@dataclass(frozen=True)
class LogValues:
    """What is believed of the logs of bytes or seconds of some plans: jointly normal.

    Attributes:
        lines: that say so.
        variants, sizes: (plans), of each.
        mean: (plans).
        share: (plans), of what is fixed in the value.
        to_readings: (plans, readings), covariance before any reading.
    """

    lines: Lines
    variants: Indices
    sizes: Array
    mean: Array
    share: Array
    to_readings: Array

    @cached_property
    def _explained(self) -> Array:
        explained: Array = self.to_readings @ self.lines.inverse
        return explained

    @cached_property
    def variance(self) -> Array:
        """(plans)."""
        return np.maximum(self.covariance(self), TINY)

    def covariance(self, other: LogValues) -> Array:
        """(plans): of these, row by row, with those of another one, or with its only one."""
        family, alike = self.lines.family, self.variants == other.variants
        fixed = (family.fixed[self.variants] * family.fixed[other.variants]).sum(axis=1)
        slope = (family.slope[self.variants] * family.slope[other.variants]).sum(axis=1)
        slope = slope + family.prior.own**2 * alike
        far = np.abs(np.log(self.sizes) - np.log(other.sizes))
        residual = np.exp(-far / LENGTH) * (ALIKE + (1 - ALIKE) * alike)
        before = self.share * other.share * fixed + (1 - self.share) * (1 - other.share) * slope
        explained = (self._explained * other.to_readings).sum(axis=1)
        covariance: Array = before + self.lines.spread**2 * residual - explained
        return covariance
