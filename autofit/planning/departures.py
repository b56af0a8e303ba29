"""How step times depart from their lines.

A step time need not be a line of the micro-batch: launches set a floor, a cache or another kernel
makes it jump, some sizes suit a kernel better than others. The log of a step time is therefore a
line plus a departure that changes in steps: between two measured sizes it jumps from the one's to
the other's, nobody knows where. A probe halfway is therefore as likely to be as good as the better
of the two as it is to be as bad as the worse, which is what makes it worth a try. Beyond the sizes
that a variant ran, its departure changes as those of the other variants do, or not at all: they
launch similar kernels on the same device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autofit.planning.curves import Point
from autofit.planning.least_squares import Array

LEAST = 0.01
"""Standard deviation of the log of a plan's mean step time around its line where nothing says that
departures are larger: kernels suit some micro-batches better than others."""

_SURE = 2.0  # standard errors by which residuals must exceed noise to be called departures
_BEYOND = 1e9  # no size has such a log
_ALIKE = 0.6  # the probability that a variant departs as the others do


def spread_of(residuals: Array, noise: Array) -> float:
    """Return the standard deviation of departures that explains these residuals beyond noise.

    Args:
        residuals: (points), logs of measured over expected step times.
        noise: (points), their standard deviation where there is no departure.
    """
    if not len(residuals):
        return LEAST
    excess = (residuals**2 - noise**2).sum() - _SURE * np.sqrt(2 * (noise**4).sum())
    return float(np.sqrt(max(LEAST**2, excess / len(residuals))))


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
        self._alike = random.random((draws, variants)) < _ALIKE
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
        # (variants): how many sizes each ran; (variants, most sizes): their logs, then `_BEYOND`;
        # (variants, most sizes, draws): the departures there.
        self._count = np.bincount(of, minlength=variants)
        at = np.arange(len(of)) - np.repeat(np.cumsum(self._count) - self._count, self._count)
        self._sizes = np.full((variants, self._count.max()), _BEYOND)
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
