"""How far measured speeds stray: the error of a probe, and of a plan that was probed several times.

A probe has the standard error of its median step; and from one probe to the next, step times differ
by more than that, because the machine does. The variance between probes is learned from plans that
were probed more than once. The scatter of single steps is no part of it: a host that takes some
steps of a probe away moves those far and their median hardly at all.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from autofit.measurement import Trial, TrialKind, median_error
from autofit.plan import Plan

BETWEEN = 0.01
"""Standard deviation of the log of a probe's step time from one probe to the next before any plan
was repeated. It counts as one repetition."""

_SIMILAR = 1.5  # step times within this factor of each other are assumed to be equally noisy
_REMEMBERED = 10_000  # probes; each decision of a search asks about all that it made
_ENOUGH = 2  # repetitions in the final comparison from which they alone say how it scatters
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Standard errors of a 95 % interval by degrees of freedom, from 1 on (Student's t)."""


class Noise:
    """The errors of probes; all are standard deviations of logs of step times.

    Args:
        probes: of a search; those without step times are left out.

    Attributes:
        repeated: the timed probes of each plan that was timed more than once.
    """

    def __init__(self, probes: Sequence[Trial]) -> None:
        timed = [trial for trial in probes if trial.measurement.step_times_s]
        self._usual = _of_similar([(seconds_of(trial), _error_of_steps(trial)) for trial in timed])
        self.repeated = _repeated(timed)
        compared = _repeated(trial for trial in timed if trial.kind is TrialKind.CONFIRMATION)
        self._between, self._degrees = self._learned(self.repeated)
        self._learned_compared = self._between, self._degrees
        found = self._learned(compared)
        if found[1] > _ENOUGH:
            self._learned_compared = found

    def of(self, trial: Trial) -> float:
        """Return the error of a timed probe.

        That of its steps is the larger of its own and the median of all probes with similar step
        times: a few steps alone tell little.
        """
        between, _ = self._learned_of([trial])
        return math.hypot(self._of_steps(trial), between)

    def of_all(self, trials: Sequence[Trial]) -> float:
        """Return the error of the median of one plan's timed probes."""
        return statistics.median(map(self.of, trials)) / math.sqrt(len(trials))

    def significant(self, trials: Sequence[Trial]) -> float:
        """Return how many errors a 95 % interval of those probes reaches to either side."""
        _, degrees = self._learned_of(trials)
        return _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.7 / degrees

    def _learned_of(self, trials: Sequence[Trial]) -> tuple[float, int]:
        """Return the deviation between such probes, and its degrees of freedom.

        The blocks of the final comparison ran in turns and in full; once some were repeated, they
        say it alone. The machine may have changed since the search.
        """
        if trials and all(trial.kind is TrialKind.CONFIRMATION for trial in trials):
            return self._learned_compared
        return self._between, self._degrees

    def _learned(self, repeated: Iterable[Sequence[Trial]]) -> tuple[float, int]:
        squares, degrees = BETWEEN**2, 1
        for trials in repeated:
            logs = [math.log(seconds_of(trial)) for trial in trials]
            explained = statistics.fmean(self._of_steps(trial) ** 2 for trial in trials)
            squares += (statistics.variance(logs) - explained) * (len(logs) - 1)
            degrees += len(logs) - 1
        return math.sqrt(max(squares, BETWEEN**2) / degrees), degrees

    def _of_steps(self, trial: Trial) -> float:
        return max(_error_of_steps(trial), self._usual[seconds_of(trial)])


def seconds_of(trial: Trial) -> float:
    """Return the median seconds of one micro-batch of a timed probe."""
    return statistics.median(trial.measurement.step_times_s) / trial.plan.accumulation_steps


def _error_of_steps(trial: Trial) -> float:
    return _median_error(tuple(trial.measurement.step_times_s))


@lru_cache(_REMEMBERED)
def _median_error(times: tuple[float, ...]) -> float:
    return median_error(times)


def _repeated(timed: Iterable[Trial]) -> list[list[Trial]]:
    alike: dict[Plan, list[Trial]] = {}
    for trial in timed:
        alike.setdefault(trial.plan, []).append(trial)
    return [trials for trials in alike.values() if len(trials) > 1]


def _of_similar(timed: Sequence[tuple[float, float]]) -> Mapping[float, float]:
    """Return seconds -> the median error of all probes with similar seconds.

    Args:
        timed: (seconds, error) of each probe.
    """
    ordered = sorted(timed)
    within: list[float] = []  # the errors of ordered[low:high], sorted
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
        found[seconds] = (within[(count - 1) // 2] + within[count // 2]) / 2
    return found
