"""The least-squares problem of lines through measurements, and its solutions.

Weights are standard normal beforehand, and log y is a function of them that is nearly linear close
to the solution. `nearest` solves the problem for many perturbed copies at once, and `likeliest` for
the measurements as they are. Of the readings only sums over each line enter a system of equations,
so its size is that of the weights that lines share, and the work grows with the readings.
"""

from __future__ import annotations

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
class Readings:
    """The least-squares problem of points that were measured on several lines.

    Its weights are terms, which the lines share, then one for each line's own slope.

    Attributes:
        starts: (lines), each line's first reading; the readings are sorted by line.
        x, log_y: (readings), the measured points.
        at_least: (readings), whether y is only a lower bound.
        precision: (readings), inverse variance of log y.
        mean_a, mean_b: (lines), A and B where all weights are zero.
        features_a, features_b: (lines, terms), derivatives of A and B by each term.
        own: derivative of B by a line's own weight.
    """

    starts: NDArray[np.intp]
    x: Array
    log_y: Array
    at_least: NDArray[np.bool_]
    precision: Array
    mean_a: Array
    mean_b: Array
    features_a: Array
    features_b: Array
    own: float

    @cached_property
    def line(self) -> NDArray[np.intp]:
        """(readings): the line of each."""
        counts = np.diff(np.append(self.starts, len(self.x)))
        return np.repeat(np.arange(len(self.starts)), counts)

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

    def parts(self, weights: Array) -> tuple[Array, Array]:
        """Return the columns of the terms, and of the lines' own weights."""
        terms = self.features_a.shape[1]
        return weights[:, :terms], weights[:, terms:]

    def predicted(self, weights: Array) -> tuple[Array, Array]:
        """Return (draws, readings): log y, and the share of y that the intercept has.

        Exponentials are of each line alone. Far from the solution they may overflow; log y is then
        no number.
        """
        terms, own = self.parts(weights)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            fixed = np.exp(self.mean_a + terms @ self.features_a.T)[:, self.line]
            slope = np.exp(self.mean_b + terms @ self.features_b.T + self.own * own)
            total = slope[:, self.line] * self.x + fixed
            return np.log(total), fixed / total

    def over_lines(self, values: Array) -> Array:
        """Return (draws, lines): sums over the readings of each."""
        sums: Array = np.add.reduceat(values, self.starts, axis=1)
        return sums

    def step(self, share: Array, precision: Array, gradient: Array) -> Array:
        """Return (draws, weights): the solution of the problem linearized somewhere.

        The lines' own weights are eliminated from its normal equations.

        Args:
            share: (draws, readings), of y that the intercept has there.
            precision: (draws, readings), inverse variances.
            gradient: (draws, weights), the right side.
        """
        of_a = precision * share
        of_b = precision - of_a
        aa = self.over_lines(of_a * share)
        ab = self.over_lines(of_a) - aa
        bb = self.over_lines(of_b) - ab
        diagonal = 1 + self.own**2 * bb  # of the own weights
        left = self.own**2 / diagonal  # by which elimination takes away products with B
        a, b, products = self.products
        sums = aa - left * ab**2, ab - left * ab * bb, bb - left * bb**2
        of_aa, of_ab, of_bb = (each @ product for each, product in zip(sums, products, strict=True))
        size = self.features_a.shape[1]
        others = np.zeros((len(aa), size, size))
        others[:, a, a] = of_aa.reshape(others[:, a, a].shape)
        others[:, b, b] += of_bb.reshape(others[:, b, b].shape)
        mixed = of_ab.reshape(others[:, a, b].shape)
        others[:, a, b] += mixed
        others[:, b, a] += mixed.transpose(0, 2, 1)
        others[:, range(size), range(size)] += 1
        of_terms, of_own = self.parts(gradient)
        shift = self.own * of_own / diagonal
        right = of_terms - (ab * shift) @ self.features_a - (bb * shift) @ self.features_b
        terms = np.linalg.solve(others, right[:, :, None])[:, :, 0]
        pull = ab * (terms @ self.features_a.T) + bb * (terms @ self.features_b.T)
        return np.hstack([terms, (of_own - self.own * pull) / diagonal])


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
        trial = weights[moving] + length[moving, None] * step[moving]
        value, share = readings.predicted(trial)
        away = prior[moving] - trial
        with np.errstate(over="ignore", invalid="ignore"):
            residual = target[moving] - value
            holds = readings.at_least & (residual < 0)
            precision = np.where(holds, INACTIVE, readings.precision)
            pull = precision * residual
            trial_cost = (away**2).sum(axis=1) + (pull * residual).sum(axis=1)
        better = trial_cost < cost[moving]  # never where log y is no number
        accepted = moving[better]
        weights[accepted], cost[accepted] = trial[better], trial_cost[better]
        length[moving] = np.where(
            better, np.minimum(1.0, 2 * length[moving]), length[moving] / SHORTENED
        )
        if len(accepted):
            pull, share, precision = pull[better], share[better], precision[better]
            of_a = readings.over_lines(pull * share)
            of_b = readings.over_lines(pull) - of_a
            by_terms = of_a @ readings.features_a + of_b @ readings.features_b
            gradient = np.hstack([by_terms, readings.own * of_b]) + away[better]
            step[accepted] = readings.step(share, precision, gradient)
            promise[accepted] = np.einsum("dw,dw->d", gradient, step[accepted])
        ahead = length[moving, None] * step[moving]
        is_long = np.abs(ahead).max(axis=1) >= LEAST_STEP
        moving = moving[is_long & (length[moving] * promise[moving] >= least_gain)]
        if not len(moving):
            break
    return weights


def likeliest(readings: Readings) -> Array:
    """Return (1, weights): the likeliest weights."""
    count = readings.features_a.shape[1] + len(readings.starts)
    return nearest(np.zeros((1, count)), readings, np.zeros((1, len(readings.log_y))))
