"""Departures of measured step times from their lines, and what they say about other sizes.

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

from autofit.planning.curves import Point
from autofit.planning.least_squares import Array

LEAST = 0.01
"""Standard deviation of the log of a plan's mean step time around its line where nothing says that
departures are larger: kernels suit some micro-batches better than others."""

_SURE = 2.0  # standard errors by which residuals must exceed noise to be called departures
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
        points: the measured step times.
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
        by_plan: dict[tuple[int, float], list[int]] = {}
        for index, point in enumerate(points):
            by_plan.setdefault((point.variant, float(np.log(point.x))), []).append(index)
        self._own: dict[int, list[tuple[float, Array]]] = {}
        for (variant, log_x), its in sorted(by_plan.items()):
            weights = np.array([points[index].error ** -2 for index in its])
            precision = weights.sum() + spread**-2
            mean = residuals[:, its] @ weights / precision
            drawn = mean + random.standard_normal(draws) / np.sqrt(precision)
            self._own.setdefault(variant, []).append((log_x, drawn))
        sizes = sorted({log_x for _, log_x in by_plan})
        self._common_x = np.array(sizes)
        self._common = np.array(
            [
                np.mean([d.mean() for own in self._own.values() for x, d in own if x == size])
                for size in sizes
            ]
        )

    def at(self, log_x: Array) -> Array:
        """Return (draws, variants): departures at logs of micro-batches, (draws or 1, variants)."""
        common = np.interp(log_x, self._common_x, self._common)
        departures: Array = self._alike * common
        for variant, own in self._own.items():
            departures[:, variant] = self._of(variant, own, log_x[:, variant])
        return departures

    def of(self, variant: int, log_x: float) -> Array:
        """Return (draws,): departures of one variant at one size."""
        x = np.array([log_x])
        if variant in self._own:
            return self._of(variant, self._own[variant], x)
        common = np.interp(x, self._common_x, self._common)
        departure: Array = self._alike[:, variant] * common
        return departure

    def _of(self, variant: int, own: Sequence[tuple[float, Array]], log_x: Array) -> Array:
        sizes = np.array([x for x, _ in own])
        values = np.array([drawn for _, drawn in own])  # (sizes, draws)
        draw = np.arange(values.shape[1])
        after = np.searchsorted(sizes, log_x)
        left, right = np.maximum(after - 1, 0), np.minimum(after, len(sizes) - 1)
        width = sizes[right] - sizes[left]
        share = np.where(width > 0, (log_x - sizes[left]) / np.where(width > 0, width, 1.0), 0.0)
        chosen = np.where(share > self._jump[:, variant], right, left)
        own_departure = values[chosen, draw]
        nearest = np.clip(log_x, sizes[0], sizes[-1])
        change = np.interp(log_x, self._common_x, self._common) - np.interp(
            nearest, self._common_x, self._common
        )
        departure: Array = own_departure + self._alike[:, variant] * change
        return departure
