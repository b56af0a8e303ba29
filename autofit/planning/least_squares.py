"""The least-squares problem of lines through measurements, and its solutions.

Weights are standard normal beforehand, and log y is a function of them that is nearly linear close
to the solution. `nearest` solves the problem for many perturbed copies at once, and `fit` for the
measurements as they are. Of the readings only sums over each line enter a system of equations, so
its size is that of the weights that lines share, and the work grows with the readings.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autofit.planning.constants import (
    INACTIVE,
    ITERATIONS,
    LEAST_GAIN,
    LEAST_STEP,
    MANY_READINGS,
    SHORTENED,
)

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Fitted:
    """The solutions of a problem, one a draw.

    Attributes:
        weights: (draws, weights), the likeliest.
        log_y: (draws, readings), the values of the lines there.
        log_evidence: (draws), log probability of the measurements, whatever the weights; less a
            constant that all problems of the same measurements share.
    """

    weights: Array
    log_y: Array
    log_evidence: Array


@dataclass(frozen=True)
class Readings:
    """The least-squares problem of points that were measured on several lines, in every draw.

    A draw's weights are its terms, which the lines share, then one for each line's own slope, then
    one for each feature of log y.

    Attributes:
        starts: (lines), each line's first reading; the readings are sorted by line.
        log_x, log_y: (readings), the measured points.
        at_least: (readings), whether y is only a lower bound.
        precision: (draws, readings), inverse variance of log y.
        mean_a, mean_b: (lines), A and B where all weights are zero.
        features_a, features_b: (lines, terms), derivatives of A and B by each term.
        features_y: (readings, features), derivatives of log y at given A and B.
        scale: (draws, weights), by which derivatives are multiplied; that of B by a line's own
            weight is the scale alone.
        power: (draws, 1), the norm by which the two parts of a cost add up. At 1 one part follows
            the other. A large power is the larger of the two: they overlap, as launching kernels
            and running them do.
    """

    starts: NDArray[np.intp]
    log_x: Array
    log_y: Array
    at_least: NDArray[np.bool_]
    precision: Array
    mean_a: Array
    mean_b: Array
    features_a: Array
    features_b: Array
    features_y: Array
    scale: Array
    power: Array

    def of(self, draws: NDArray[np.intp]) -> Readings:
        """Return the problem in these draws alone."""
        if len(draws) == len(self.power):
            return self
        few = copy(self)  # with what was found of the features
        few.__dict__.update(
            precision=self.precision[draws],
            scale=self.scale[draws],
            power=self.power[draws],
            growing=self.growing[draws],
        )
        return few

    @cached_property
    def line(self) -> NDArray[np.intp]:
        """(readings): the line of each."""
        counts = np.diff(np.append(self.starts, len(self.log_x)))
        return np.repeat(np.arange(len(self.starts)), counts)

    @cached_property
    def squares_y(self) -> Array:
        """(readings, features * features): products of each two features of log y."""
        squares = self.features_y[:, :, None] * self.features_y[:, None, :]
        return squares.reshape(len(self.log_x), -1)

    @cached_property
    def products(self) -> tuple[slice, slice, tuple[Array, Array, Array]]:
        """The terms of A, those of B, and products of each two terms' derivatives.

        Products are of A and A, A and B, B and B: (lines, terms * terms) each. Most terms are of A
        or of B alone.
        """
        a, b = _span(self.features_a), _span(self.features_b)
        of_a, of_b = self.features_a[:, a], self.features_b[:, b]
        pairs = ((of_a, of_a), (of_a, of_b), (of_b, of_b))
        aa, ab, bb = (np.einsum("li,lj->lij", *pair).reshape(len(of_a), -1) for pair in pairs)
        return a, b, (aa, ab, bb)

    @cached_property
    def growing(self) -> Array:
        """(draws, readings): x in the norm of `power`."""
        return np.exp(self.power * self.log_x)

    def parts(self, weights: Array) -> tuple[Array, Array, Array]:
        """Return the columns of the terms, of the lines' own weights, and of the features."""
        terms = self.features_a.shape[1]
        own = terms + len(self.starts)
        return weights[:, :terms], weights[:, terms:own], weights[:, own:]

    def predicted(self, weights: Array) -> tuple[Array, Array]:
        """Return (draws, readings): log y, and the share of y that the intercept has.

        Exponentials are of each line alone. Far from the solution they may overflow; log y is then
        no number.
        """
        terms, own, features = self.parts(weights * self.scale)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            fixed = np.exp(self.power * (self.mean_a + terms @ self.features_a.T))
            slope = np.exp(self.power * (self.mean_b + terms @ self.features_b.T + own))
            fixed = fixed[:, self.line]
            total = slope[:, self.line] * self.growing + fixed
            value = np.log(total) / self.power
            share = fixed / total
        if self.features_y.size:
            value += features @ self.features_y.T
        return value, share

    def over_lines(self, values: Array) -> Array:
        """Return (draws, lines): sums over the readings of each."""
        sums: Array = np.add.reduceat(values, self.starts, axis=1)
        return sums


@dataclass(frozen=True)
class _System:
    """The normal equations of the problem linearized somewhere, the lines' own weights eliminated.

    Attributes:
        own: (draws, lines), the diagonal block of the own weights.
        ab, bb: (draws, lines), sums over the readings of products of derivatives by A and B.
        yb: (draws, lines, features), likewise by features of log y and B.
        others: (draws, others, others), what elimination leaves of the block of the others.
    """

    own: Array
    ab: Array
    bb: Array
    yb: Array
    others: Array

    @classmethod
    def of(cls, readings: Readings, share: Array, precision: Array) -> _System:
        """Return the system where readings have these shares and inverse variances."""
        of_a = precision * share
        of_b = precision - of_a
        aa = readings.over_lines(of_a * share)
        ab = readings.over_lines(of_a) - aa
        bb = readings.over_lines(of_b) - ab
        features_y = readings.features_y
        ya, yb = (
            np.stack([readings.over_lines(part * column) for column in features_y.T], axis=2)
            if features_y.size
            else np.zeros((*aa.shape, 0))
            for part in (of_a, of_b)
        )
        of_terms, of_own, of_features = readings.parts(readings.scale)
        scale = np.hstack([of_terms, of_features])
        own = 1 + of_own**2 * bb
        left = of_own**2 / own  # by which elimination takes away products with B
        a, b, products = readings.products
        sums = aa - left * ab**2, ab - left * ab * bb, bb - left * bb**2
        of_aa, of_ab, of_bb = (each @ product for each, product in zip(sums, products, strict=True))
        size = scale.shape[1]
        others, terms = np.zeros((len(aa), size, size)), slice(readings.features_a.shape[1])
        features = slice(terms.stop, size)
        others[:, a, a] = of_aa.reshape(others[:, a, a].shape)
        others[:, b, b] += of_bb.reshape(others[:, b, b].shape)
        mixed = of_ab.reshape(others[:, a, b].shape)
        others[:, a, b] += mixed
        others[:, b, a] += mixed.transpose(0, 2, 1)
        mixed = readings.features_a.T @ (ya - (left * ab)[:, :, None] * yb)
        mixed += readings.features_b.T @ ((1 - left * bb)[:, :, None] * yb)
        others[:, terms, features], others[:, features, terms] = mixed, mixed.transpose(0, 2, 1)
        squares = (precision @ readings.squares_y).reshape(others[:, features, features].shape)
        others[:, features, features] = squares - yb.transpose(0, 2, 1) @ (left[:, :, None] * yb)
        others *= scale[:, :, None] * scale[:, None, :]
        diagonal = range(size)
        others[:, diagonal, diagonal] += 1
        return cls(own, ab, bb, yb, others)

    def solved(self, readings: Readings, gradient: Array) -> Array:
        """Return (draws, weights): the solution at this right side."""
        of_terms, of_own, of_features = readings.parts(gradient)
        terms_scale, own_scale, features_scale = readings.parts(readings.scale)
        features_a, features_b = readings.features_a, readings.features_b
        shift = own_scale * of_own / self.own
        by_terms = (self.ab * shift) @ features_a + (self.bb * shift) @ features_b
        by_features = np.einsum("dlf,dl->df", self.yb, shift)
        right = np.hstack(
            [of_terms - terms_scale * by_terms, of_features - features_scale * by_features]
        )
        others = np.linalg.solve(self.others, right[:, :, None])[:, :, 0]
        count = of_terms.shape[1]
        terms, features = terms_scale * others[:, :count], features_scale * others[:, count:]
        pull = self.ab * (terms @ features_a.T) + self.bb * (terms @ features_b.T)
        pull += np.einsum("dlf,df->dl", self.yb, features)
        own = (of_own - own_scale * pull) / self.own
        return np.hstack([others[:, :count], own, others[:, count:]])

    def log_determinant(self) -> Array:
        """(draws): the log of the determinant of the whole system."""
        determinant: Array = np.log(self.own).sum(axis=1) + np.linalg.slogdet(self.others)[1]
        return determinant


def _span(features: Array) -> slice:
    """Return the columns from the first to the last that is not zero."""
    at = np.flatnonzero(np.any(features, axis=0))
    return slice(at[0], at[-1] + 1) if len(at) else slice(0)


def nearest(prior: Array, readings: Readings, errors: Array, start: Array | None = None) -> Array:
    """Return, per draw, the weights nearest to its prior draw that explain its readings.

    Damped Gauss-Newton on |weights - prior draw|^2 + |perturbed readings - line|^2 / sd^2, for all
    draws at once: a step that does not reduce a draw's cost is shortened to a quarter.

    Args:
        prior: (draws, weights), standard normal.
        readings: the measurements.
        errors: (draws, readings), standard normal; reading plus error is the target of a draw.
        start: (draws, weights), where to begin; None: at the prior draws. From the likeliest
            weights all draws would end beside these, also where few readings leave other ways.
    """
    least_gain = LEAST_GAIN if len(readings.log_y) >= MANY_READINGS else 0.0
    target = readings.log_y + errors / np.sqrt(readings.precision)
    weights, step = (prior if start is None else start).copy(), np.zeros_like(prior)
    promise = np.zeros(len(prior))
    cost, length = np.full(len(prior), np.inf), np.ones(len(prior))
    moving = np.arange(len(prior))
    for _ in range(ITERATIONS):
        here = readings.of(moving)
        trial = weights[moving] + length[moving, None] * step[moving]
        value, share = here.predicted(trial)
        away = prior[moving] - trial
        with np.errstate(over="ignore", invalid="ignore"):
            residual = target[moving] - value
            precision = np.where(here.at_least & (residual < 0), INACTIVE, here.precision)
            pull = precision * residual
            trial_cost = (away**2).sum(axis=1) + (pull * residual).sum(axis=1)
        better = trial_cost < cost[moving]  # never where log y is no number
        accepted = moving[better]
        weights[accepted], cost[accepted] = trial[better], trial_cost[better]
        length[moving] = np.where(
            better, np.minimum(1.0, 2 * length[moving]), length[moving] / SHORTENED
        )
        if len(accepted):
            at = readings.of(accepted)
            if len(accepted) < len(better):
                pull, share, precision = pull[better], share[better], precision[better]
            of_a = at.over_lines(pull * share)
            of_b = at.over_lines(pull) - of_a
            by_terms = of_a @ at.features_a + of_b @ at.features_b
            gradient = np.hstack([by_terms, of_b, pull @ at.features_y]) * at.scale + away[better]
            step[accepted] = _System.of(at, share, precision).solved(at, gradient)
            promise[accepted] = np.einsum("dw,dw->d", gradient, step[accepted])
        ahead = length[moving, None] * step[moving]
        is_long = np.abs(ahead).max(axis=1) >= LEAST_STEP
        moving = moving[is_long & (length[moving] * promise[moving] >= least_gain)]
        if not len(moving):
            break
    return weights


def fit(readings: Readings, start: Array | None = None) -> Fitted:
    """Return the likeliest lines and the evidence for their prior, by Laplace's approximation.

    Source: MacKay, Neural Computation 4, 1992: the likelihood of the likeliest weights, times the
    share of the prior that is as likely as they are. Bounds that hold count for nothing.

    Args:
        readings: the measurements.
        start: (draws, weights), where to begin; None: all zero.
    """
    none, exactly = np.zeros_like(readings.scale), np.zeros_like(readings.precision)
    weights = nearest(none, readings, exactly, start)
    value, share = readings.predicted(weights)
    counts = ~(readings.at_least & (value > readings.log_y))
    precision = np.where(counts, readings.precision, 0.0)
    log_volume = _System.of(readings, share, precision).log_determinant()
    log_volume -= np.where(counts, np.log(readings.precision), 0.0).sum(axis=1)
    misfit = (precision * (readings.log_y - value) ** 2).sum(axis=1)
    return Fitted(weights, value, -((weights**2).sum(axis=1) + misfit + log_volume) / 2)
