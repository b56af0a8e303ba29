"""How step times stray: noise from one probe of a plan to the next, and departures from the lines.

A few steps alone tell little of noise, so probes of similar step times are asked together.

A step time need not be a line of the micro-batch: launches set a floor, a cache or another kernel
makes it jump, some sizes suit a kernel better than others. The log of a step time is therefore a
line plus a departure that changes in steps: between two measured sizes it jumps from the one's to
the other's, nobody knows where. A probe halfway is therefore as likely to be as good as the better
of the two as it is to be as bad as the worse, which is what makes it worth a try. Beyond the sizes
that a variant ran, its departure changes as those of the other variants do, or not at all: they
launch similar kernels on the same device.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autofit.measurement import Role, Trial
from autofit.plan import Plan
from autofit.planning.curves import Point
from autofit.planning.least_squares import Array

LEAST = 0.01
"""Standard deviation of the log of a plan's mean step time around its line where nothing says that
departures are larger: kernels suit some micro-batches better than others."""

_LEAST_NOISE = 0.002  # perfectly regular steps still do not predict the next probe exactly
_SIMILAR = 1.5  # step times within this factor of each other are assumed to be equally noisy
_REMEMBERED = 10_000  # probes; each decision of a search asks about all that it made
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
        own: dict[int, list[tuple[float, Array]]] = {}
        by_size: dict[float, list[float]] = {}
        for (variant, log_x), its in sorted(by_plan.items()):
            weights = np.array([points[index].error ** -2 for index in its])
            precision = weights.sum() + spread**-2
            mean = residuals[:, its] @ weights / precision
            drawn = mean + random.standard_normal(draws) / np.sqrt(precision)
            own.setdefault(variant, []).append((log_x, drawn))
            by_size.setdefault(log_x, []).append(float(drawn.mean()))
        # Variant -> logs of its sizes, and (sizes, draws) its departures there.
        self._own = {
            variant: (np.array([x for x, _ in its]), np.array([drawn for _, drawn in its]))
            for variant, its in own.items()
        }
        self._common_x = np.array(sorted(by_size))
        self._common = np.array([np.mean(by_size[log_x]) for log_x in sorted(by_size)])

    def at(self, log_x: Array) -> Array:
        """Return (draws, variants): departures at logs of micro-batches, (draws or 1, variants)."""
        common = np.interp(log_x, self._common_x, self._common)
        departures: Array = self._alike * common
        for variant in self._own:
            departures[:, variant] = self._of(variant, log_x[:, [variant]])[:, 0]
        return departures

    def of(self, variants: NDArray[np.intp], log_x: Array) -> Array:
        """Return (draws, plans): departures of plans of these variants at these sizes.

        Args:
            variants: (plans), of each.
            log_x: (plans), logs of their micro-batches.
        """
        common = np.interp(log_x, self._common_x, self._common)
        departures: Array = self._alike[:, variants] * common
        for variant in np.unique(variants):
            if variant in self._own:
                its = variants == variant
                departures[:, its] = self._of(int(variant), log_x[None, its])
        return departures

    def _of(self, variant: int, log_x: Array) -> Array:
        """Return (draws, sizes): departures of a variant that was measured at some size.

        Args:
            variant: which.
            log_x: (draws or 1, sizes).
        """
        sizes, values = self._own[variant]
        draw = np.arange(values.shape[1])[:, None]
        after = np.searchsorted(sizes, log_x)
        left, right = np.maximum(after - 1, 0), np.minimum(after, len(sizes) - 1)
        width = sizes[right] - sizes[left]
        share = np.where(width > 0, (log_x - sizes[left]) / np.where(width > 0, width, 1.0), 0.0)
        chosen = np.where(share > self._jump[:, [variant]], right, left)
        own_departure = values[chosen, draw]
        nearest = np.clip(log_x, sizes[0], sizes[-1])
        change = np.interp(log_x, self._common_x, self._common) - np.interp(
            nearest, self._common_x, self._common
        )
        departure: Array = own_departure + self._alike[:, [variant]] * change
        return departure


class Noise:
    """The noise of probes.

    Args:
        probes: of a search; those without step times are left out.

    Attributes:
        repeated: the timed probes of each plan that was timed more than once, in the search or in
            the final comparison. That runs steps in full: its blocks repeat one another alone.
    """

    def __init__(self, probes: Sequence[Trial]) -> None:
        timed = [trial for trial in probes if trial.measurement.step_times_s]
        self._usual = _scatter_of_similar(
            [(seconds_of(trial), scatter_of_steps(trial)) for trial in timed]
        )
        alike: dict[tuple[Plan, bool], list[Trial]] = {}
        for trial in timed:
            alike.setdefault((trial.plan, trial.role is Role.CONFIRMED), []).append(trial)
        self.repeated = [trials for trials in alike.values() if len(trials) > 1]
        in_search = self._excess_of(compared=False, believed=1.0)
        in_comparison = self._excess_of(compared=True, believed=in_search)
        self._excess = {False: in_search, True: in_comparison}

    def of(self, trial: Trial) -> float:
        """Return the standard deviation of the log of a probe's step time, had it been repeated.

        Estimated as the largest of the scatter of the probe's own steps, and the median scatter of
        all probes with similar step times; the median because one probe that another process
        disturbed says nothing about the others. Where repeated probes of a plan differ by more than
        the median, that is so much larger; where by less, both are so much smaller.
        """
        excess = self._excess[trial.role is Role.CONFIRMED]
        own = scatter_of_steps(trial) * min(1.0, excess)
        return max(own, self._usual[seconds_of(trial)] * excess)

    def _excess_of(self, *, compared: bool, believed: float) -> float:
        """Return the factor by which probes scatter more than their steps.

        Args:
            compared: of the final comparison's probes; else, of the search's.
            believed: the factor until a plan was repeated; it counts as one repetition.
        """
        squares, degrees = believed**2, 1
        for trials in self.repeated:
            if (trials[0].role is Role.CONFIRMED) is not compared:
                continue
            logs = [math.log(seconds_of(trial)) for trial in trials]
            noise = statistics.fmean(self._usual[seconds_of(trial)] for trial in trials)
            squares += statistics.variance(logs) * (len(logs) - 1) / noise**2
            degrees += len(logs) - 1
        return math.sqrt(squares / degrees)


def seconds_of(trial: Trial) -> float:
    """Return the median seconds of one micro-batch of a timed probe."""
    middle, _ = _steps(tuple(trial.measurement.step_times_s))
    return middle / trial.plan.accumulation_steps


def scatter_of_steps(trial: Trial) -> float:
    """Return the standard deviation of the log of a timed probe's steps around their median."""
    _, scatter = _steps(tuple(trial.measurement.step_times_s))
    return scatter


@lru_cache(_REMEMBERED)
def _steps(times: tuple[float, ...]) -> tuple[float, float]:
    """Return the median of step times, and the standard deviation of their logs around it."""
    middle = statistics.median(times)
    squares = sum(math.log(seconds / middle) ** 2 for seconds in times)
    return middle, math.sqrt(squares / max(1, len(times) - 1))


def _scatter_of_similar(timed: Sequence[tuple[float, float]]) -> Mapping[float, float]:
    """Return seconds -> the median scatter of all probes with similar seconds.

    Args:
        timed: (seconds, scatter) of each probe.
    """
    ordered = sorted(timed)
    within: list[float] = []  # the scatter of ordered[low:high], sorted
    low = high = 0
    found: dict[float, float] = {}
    for seconds, _ in ordered:
        while high < len(ordered) and ordered[high][0] / seconds < _SIMILAR:
            insort(within, ordered[high][1])
            high += 1
        while ordered[low][0] / seconds <= 1 / _SIMILAR:
            del within[bisect_left(within, ordered[low][1])]
            low += 1
        count = len(within)
        found[seconds] = max(_LEAST_NOISE, (within[(count - 1) // 2] + within[count // 2]) / 2)
    return found
