"""The least-squares problem of lines through measurements, and its solutions.

Weights are standard normal beforehand, and log y is a function of them that is nearly linear close
to the solution. `nearest` solves the problem for many perturbed copies at once, and `fit` for the
measurements as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

_ITERATIONS = 12
_INACTIVE_SD = 1e3  # of a bound that holds: the reading then has no weight


def added(log_fixed: Array, log_growing: Array, power: Array) -> Array:
    """Return the log of the sum of two parts of a cost, in the norm of that power.

    A power of 1 is the sum: one part follows the other. A large power is the larger of the two:
    they overlap, as launching kernels and running them do.
    """
    total: Array = np.logaddexp(power * log_fixed, power * log_growing) / power
    return total


@dataclass(frozen=True)
class Fitted:
    """The solution of a problem.

    Attributes:
        log_y: (readings), the likeliest values of the lines.
        log_evidence: log probability of the measurements, whatever the weights; less a constant
            that all problems of the same measurements share.
    """

    log_y: Array
    log_evidence: float


@dataclass(frozen=True)
class Readings:
    """The least-squares problem of a set of measurements; one entry or row per reading.

    Attributes:
        log_x, log_y: the measured points.
        sd: standard deviation of log y.
        at_least: whether y is only a lower bound.
        mean_a, mean_b: A and B where all weights are zero.
        features_a, features_b, features_y: (readings, weights), derivatives by each weight of A, B,
            and log y at given A and B.
        power: (draws, 1), see `added`.
    """

    log_x: Array
    log_y: Array
    sd: Array
    at_least: NDArray[np.bool_]
    mean_a: Array
    mean_b: Array
    features_a: Array
    features_b: Array
    features_y: Array
    power: Array

    def jacobian(self, share: Array) -> Array:
        """Return (draws, readings, weights): derivatives of log y; see `predicted` for `share`."""
        share = share[:, :, None]
        jacobian: Array = share * self.features_a + (1 - share) * self.features_b + self.features_y
        return jacobian

    def predicted(self, weights: Array) -> tuple[Array, Array]:
        """Return log y at each reading, and the share of y that the intercept has."""
        a = self.mean_a + weights @ self.features_a.T
        b = self.mean_b + weights @ self.features_b.T + self.log_x
        value = added(a, b, self.power)
        share = np.exp(self.power * (a - value))
        return value + weights @ self.features_y.T, share


def nearest(prior: Array, readings: Readings, errors: Array) -> Array:
    """Return, per draw, the weights nearest to its prior draw that explain its readings.

    Damped Gauss-Newton on |weights - prior draw|^2 + |perturbed readings - line|^2 / sd^2, for all
    draws at once: a step that does not reduce a draw's cost is shortened to a quarter.

    Args:
        prior: (draws, weights), standard normal.
        readings: the measurements.
        errors: (draws, readings), standard normal; reading plus error is the target of a draw.
    """
    target = readings.log_y + readings.sd * errors

    def noise(value: Array) -> Array:
        return np.where(readings.at_least & (value > target), _INACTIVE_SD, readings.sd)

    def cost_of(weights: Array) -> Array:
        value, _ = readings.predicted(weights)
        misfit = (target - value) / noise(value)
        cost: Array = ((weights - prior) ** 2).sum(axis=1) + (misfit**2).sum(axis=1)
        return cost

    def minimum_near(weights: Array) -> Array:
        """Return the minimum of the problem linearized at these weights."""
        value, share = readings.predicted(weights)
        jacobian = readings.jacobian(share)
        residual = target - value + np.einsum("snp,sp->sn", jacobian, weights - prior)
        gram = jacobian @ jacobian.transpose(0, 2, 1)
        diagonal = range(len(readings.sd))
        gram[:, diagonal, diagonal] += noise(value) ** 2
        move = np.linalg.solve(gram, residual[:, :, None])[:, :, 0]
        minimum: Array = prior + np.einsum("snp,sn->sp", jacobian, move)
        return minimum

    weights, goal = prior, prior
    cost = np.full(len(prior), np.inf)
    length = np.ones(len(prior))
    for _ in range(_ITERATIONS):
        trial = weights + length[:, None] * (goal - weights)
        trial_cost = cost_of(trial)
        better = trial_cost < cost
        weights = np.where(better[:, None], trial, weights)
        cost = np.where(better, trial_cost, cost)
        length = np.where(better, np.minimum(1.0, 2 * length), length / 4)
        goal = np.where(better[:, None], minimum_near(weights), goal)
    return weights


def fit(readings: Readings) -> Fitted:
    """Return the likeliest lines and the evidence for their prior, by Laplace's approximation.

    Source: MacKay, Neural Computation 4, 1992: the likelihood of the likeliest weights, times the
    share of the prior that is as likely as they are. Bounds that hold count for nothing.
    """
    none = np.zeros((1, readings.features_a.shape[1]))
    weights = nearest(none, readings, np.zeros((1, len(readings.sd))))
    value, share = readings.predicted(weights)
    counts = ~(readings.at_least & (value[0] > readings.log_y))
    jacobian, noise = readings.jacobian(share)[0, counts], readings.sd[counts]
    _, log_volume = np.linalg.slogdet(jacobian @ jacobian.T + np.diag(noise**2))
    misfit = (readings.log_y - value[0])[counts] / noise
    cost = (weights**2).sum() + (misfit**2).sum()
    return Fitted(value[0], float(-(cost + log_volume) / 2))
