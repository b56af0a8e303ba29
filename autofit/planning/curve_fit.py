"""Draws of a line's terms, moved to the nearest ones that explain what was measured.

The terms of a line are weights of features: log y = log(exp(A) + exp(B) * x), where A and B are
linear in the weights. For every world this solves one least-squares problem, how far the weights
move from their prior draw against how far the line stays from that world's draw of the readings,
by Gauss-Newton steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

_ITERATIONS = 12
_INACTIVE_SD = 1e3  # as good as not measured


@dataclass(frozen=True)
class Readings:
    """What was measured, and how it depends on the weights; one entry or row per reading.

    Attributes:
        log_x, log_y: where, and what.
        sd: standard deviation of log y.
        at_least: y is only known to be this or more.
        mean_a, mean_b: A and B where all weights are zero.
        features_a, features_b: (readings, weights), what a weight adds to A and to B.
    """

    log_x: Array
    log_y: Array
    sd: Array
    at_least: NDArray[np.bool_]
    mean_a: Array
    mean_b: Array
    features_a: Array
    features_b: Array


def nearest(prior: Array, readings: Readings, errors: Array) -> Array:
    """Per world, the weights nearest to its prior draw that explain its draw of the readings.

    Gauss-Newton steps in each world, shortened there while they do not bring it closer.

    Args:
        prior: (worlds, weights), standard normal.
        readings: what is to be explained.
        errors: (worlds, readings), standard normal: how far off each world takes a reading to be.
    """
    fit = _Fit(readings, errors)
    weights, goal = prior, prior
    cost = np.full(len(prior), np.inf)
    length = np.ones(len(prior))
    for _ in range(_ITERATIONS):
        trial = weights + length[:, None] * (goal - weights)
        trial_cost = fit.cost(trial, prior)
        better = trial_cost < cost
        weights = np.where(better[:, None], trial, weights)
        cost = np.where(better, trial_cost, cost)
        length = np.where(better, np.minimum(1.0, 2 * length), length / 4)
        goal = np.where(better[:, None], fit.goal(weights, prior), goal)
    return weights


class _Fit:
    """The least-squares problem of one draw of worlds."""

    def __init__(self, readings: Readings, errors: Array) -> None:
        self._readings = readings
        self._target = readings.log_y + readings.sd * errors

    def _lines(self, weights: Array) -> tuple[Array, Array]:
        """The value at each reading, and the share of it that the intercept has."""
        r = self._readings
        a = r.mean_a + weights @ r.features_a.T
        b = r.mean_b + weights @ r.features_b.T + r.log_x
        value = np.logaddexp(a, b)
        return value, np.exp(a - value)

    def _noise(self, value: Array) -> Array:
        explained = self._readings.at_least & (value > self._target)
        return np.where(explained, _INACTIVE_SD, self._readings.sd)

    def cost(self, weights: Array, prior: Array) -> Array:
        """Squared distances, from the prior draw and from the readings, of each world."""
        value, _ = self._lines(weights)
        misfit = (self._target - value) / self._noise(value)
        cost: Array = ((weights - prior) ** 2).sum(axis=1) + (misfit**2).sum(axis=1)
        return cost

    def goal(self, weights: Array, prior: Array) -> Array:
        """Where the problem, made linear around these weights, has its least cost."""
        r = self._readings
        value, share = self._lines(weights)
        share = share[:, :, None]
        jacobian = share * r.features_a + (1 - share) * r.features_b
        residual = self._target - value + np.einsum("snp,sp->sn", jacobian, weights - prior)
        gram = jacobian @ jacobian.transpose(0, 2, 1)
        diagonal = range(len(r.sd))
        gram[:, diagonal, diagonal] += self._noise(value) ** 2
        move = np.linalg.solve(gram, residual[:, :, None])[:, :, 0]
        goal: Array = prior + np.einsum("snp,sn->sp", jacobian, move)
        return goal
