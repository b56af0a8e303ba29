"""What a noisy measurement is expected to gain by what it tells: functions of draws.

The knowledge gradient of a choice is the expected gain from measuring before choosing (Frazier,
Powell and Dayanik, SIAM J. Control Optim. 47, 2008). It grows with the standard deviation of what
would be expected after the measurement, and so with the share of the variance that it explains.
"""

from __future__ import annotations

import math

import numpy as np

from autofit.planning.least_squares import Array

_LEAST = 1e-9  # standard deviation, so that nothing is divided by zero
_LEAST_OWN = 0.05  # the share of its variance that a second measurement adds at least to the first


def knowledge_gradient(mean: Array, change: Array) -> Array:
    """Return E[max(0, x)] for normal x: the gain from learning x before choosing x or nothing.

    Args:
        mean: of x.
        change: standard deviation of what x will be expected to be.
    """
    change = np.maximum(change, _LEAST)
    z = np.clip(mean / change, -30, 30)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erf(each / math.sqrt(2)) for each in z.ravel()]).reshape(z.shape)
    gain: Array = change * (density + z * (1 + below) / 2)
    return np.where(mean / change > z, mean, gain)


def explained_deviation(
    unknown: Array, first: tuple[Array, float], other: tuple[Array, float]
) -> Array:
    """Return, per column, the standard deviation of the best linear guess of the unknown.

    Args:
        unknown: (draws, columns), what is not measured.
        first, other: (draws, columns), two things that are, and the noise of each.
    """
    one, two = _correlation(*first, unknown), _correlation(*other, unknown)
    both = _correlation(*first, other[0])
    own = np.maximum(1 - both**2, _LEAST_OWN)
    share = (one**2 + two**2 - 2 * one * two * both) / own
    deviation: Array = np.sqrt(np.clip(share, 0.0, 1.0)) * unknown.std(axis=0)
    return deviation


def _correlation(x: Array, noise: float, y: Array) -> Array:
    """Return (columns): the correlation of noisy x with y."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    deviation = np.sqrt((x**2).mean(axis=0) + noise**2) * y.std(axis=0)
    found: Array = (x * y).mean(axis=0) / np.maximum(deviation, _LEAST)
    return found
