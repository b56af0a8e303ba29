"""How much faster one plan is than another, by rounds in which each of them ran once.

Work of others only ever slows a training down, by bursts or for longer. So the speed of a probe is
that of its steps that were hardly disturbed, a low quantile of their times. A whole probe may be
disturbed all the same, and there are two accounts of that:

- By itself: its log speed is that of its plan less what it was slowed by, which is small, or with
  some probability anything, exponentially distributed. Then the best of several probes tell the
  speed of a plan, and one that was hit tells little.
- With its round, for what slows the machine longer: then the log ratios of a round tell, in which
  that cancels, and their errors are symmetric, since either plan may be the one that was hit.

How wide small errors are, how probable hits, and which account is right, is not known: all are
integrated over, weighted by how well they explain the probes. Of hits all probes of a search tell:
as many as have steps that something delayed. Nothing is assumed of the speeds. So
the interval of a ratio is narrow where probes agree; one that is far off hardly moves it; and what
was seen once is believed only where no hit would explain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from autofit.measurement import Trial, TrialKind, by_plan
from autofit.plan import Plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float64]

LogSpeed: TypeAlias = Callable[[Trial], float]
_Noise: TypeAlias = tuple[float, float, float]
"""Width of small errors, probability of a hit, and how probable both are."""

CONFIDENCE = 0.95
"""Of every interval: what lies outside of it is left out at either end alike."""

# Of the log speeds of single probes. A quiet machine repeats a plan within 1 to 3 percent; beside
# one or two busy loops on two cores probes stray by 5 to 40, in bursts by factors of 1.5 to 2.5.
# tests/test_rounds.py decides on simulated ones.
_WIDTHS = {0.012: 0.5, 0.03: 0.25, 0.1: 0.15, 0.3: 0.1}  # deviation of small errors: its prior
_HITS = {0.03: 0.5, 0.3: 0.2, 0.6: 0.15, 0.85: 0.15}  # probability of a hit: its prior
_HIT_BY = 0.45  # mean log of the factor by which a hit slows a probe down: 1.6 times
# How many times as probable the second account is beforehand. Of 36 simulated searches on a machine
# that drifts by 3% a round, 16 tell a gain of 4% with 1, and 25 with 5; beside busy loops alike.
_WITH_ROUND = 5.0
_QUANTILE = 0.1  # of step times. The least of few and of many steps are not alike
# Probes of the search ran at other moments, and fewer micro-batches: they may err either way.
_SEARCHED_WIDTH, _SEARCHED_HIT = 0.03, 0.3
# A probe has delayed steps where its slow ones take longer than its fast ones by this factor. As
# many probes again were delayed as a whole, which their steps do not show. It counts as few probes,
# since some plans are unsteady by themselves.
_SLOW_QUANTILE, _DELAYED, _AS_MANY = 0.85, 1.2, 8
_STEP, _BELOW, _ABOVE = 0.005, -0.7, 2.5  # logs around a plan's fastest probe that are looked at


@dataclass(frozen=True)
class Estimate:
    """A logarithm that is not known exactly.

    Attributes:
        log: the median of what is believed of it.
        low, high: the ends of the interval that holds it with `CONFIDENCE`.
    """

    log: float
    low: float
    high: float


def steady_log_speed(trial: Trial) -> float:
    """Return the log of samples/s of a timed trial's steps that were hardly disturbed."""
    return math.log(trial.plan.samples_per_step / _step_s(trial, _QUANTILE))


def _is_timed(trial: Trial) -> bool:
    return trial.ok and bool(trial.measurement.step_times_s)


def _step_s(trial: Trial, quantile: float) -> float:
    """Return that quantile of the step times, between two of them in proportion."""
    ordered = sorted(trial.measurement.step_times_s)
    place = quantile * (len(ordered) - 1)
    low, share = int(place), place - int(place)
    return (1 - share) * ordered[low] + share * ordered[min(low + 1, len(ordered) - 1)]


def rounds_of(trials: Iterable[Trial]) -> list[dict[Plan, Trial]]:
    """Return the rounds of a final comparison, the last of which may not have ended.

    Args:
        trials: of a search; a plan that has its turn again begins another round.
    """
    rounds: list[dict[Plan, Trial]] = []
    compared = (trial for trial in trials if trial.kind is TrialKind.CONFIRMATION)
    for trial in sorted(compared, key=lambda each: each.number):
        if not rounds or trial.plan in rounds[-1]:
            rounds.append({})
        rounds[-1][trial.plan] = trial
    return rounds


class Rounds:
    """What the rounds of a final comparison, and the probes before it, tell of plans.

    Args:
        trials: of a search; only those that ran and were timed tell anything.
        log_speed: of a trial.

    Attributes:
        plans: that had a turn, in the order of their first.
        is_disturbed: whether a tenth of all probes or more have steps that something delayed.
    """

    def __init__(self, trials: Sequence[Trial], log_speed: LogSpeed = steady_log_speed) -> None:
        ran = [trial for trial in trials if _is_timed(trial)]
        self._rounds = [
            {plan: log_speed(trial) for plan, trial in each.items() if _is_timed(trial)}
            for each in rounds_of(trials)
        ]
        searched = by_plan(trial for trial in ran if trial.kind is not TrialKind.CONFIRMATION)
        self._searched = {plan: median(map(log_speed, its)) for plan, its in searched.items()}
        delayed = [_step_s(t, _SLOW_QUANTILE) > _DELAYED * _step_s(t, _QUANTILE) for t in ran]
        self.is_disturbed = 10 * sum(delayed) > len(delayed)
        self._noises = list(_noises(delayed))
        self._known: dict[tuple[Plan, Plan], Estimate] = {}
        self.plans = list(dict.fromkeys(plan for each in self._rounds for plan in each))

    def ahead(self, plan: Plan, other: Plan) -> Estimate:
        """Return the log by which a plan is faster than another, both of which ran."""
        if plan == other:
            return Estimate(0.0, 0.0, 0.0)
        if (plan, other) not in self._known:
            both = self._probes(plan), self._probes(other)
            self._known[plan, other] = _ahead(*both, self._noises)
        return self._known[plan, other]

    def speed(self, plan: Plan) -> Estimate:
        """Return the log of the undisturbed samples/s of a plan that ran."""
        return _speed(self._probes(plan), self._noises)

    def _probes(self, plan: Plan) -> _Probes:
        turns = {at: each[plan] for at, each in enumerate(self._rounds) if plan in each}
        return _Probes(turns, self._searched.get(plan))


@dataclass(frozen=True)
class _Probes:
    """The log speeds of a plan: by the number of the round, and in the search, if it ran there."""

    turns: Mapping[int, float]
    searched: float | None

    @property
    def fastest(self) -> float:
        return max(self.turns.values()) if self.turns else self.searched or 0.0


def _ahead(plan: _Probes, other: _Probes, noises: Sequence[_Noise]) -> Estimate:
    """Return the log by which one plan is faster."""
    import numpy as np  # on demand: a report that is only exported needs none of this

    fastest, count = plan.fastest - other.fastest, _count()
    apart: Array = fastest + _STEP * np.arange(1 - count, count, dtype=np.float64)
    density: Array = np.zeros(len(apart))
    for width, hit, prior in noises:
        own, others = (_likelihood(each, width, hit) for each in (plan, other))
        by_itself: Array = _STEP**2 * np.correlate(own, others, "full")
        of_ratios = _likelihood_of_ratios(plan, other, apart, width, hit)
        with_round = _WITH_ROUND * _STEP * of_ratios
        density = density + prior * (by_itself + with_round)
    return _estimate(apart, density)


def _speed(plan: _Probes, noises: Sequence[_Noise]) -> Estimate:
    grid = plan.fastest + _grid()
    density = 0.0 * grid
    for width, hit, prior in noises:
        density = density + prior * _likelihood(plan, width, hit)
    return _estimate(grid, density)


def _noises(delayed: Sequence[bool]) -> Iterable[_Noise]:
    """Yield each width and probability of hits with its prior, given which probes were delayed."""
    count = min(_AS_MANY, len(delayed))
    hits = count * min(1.0, 2 * sum(delayed) / max(1, len(delayed)))
    for width, of_width in _WIDTHS.items():
        for hit, of_hit in _HITS.items():
            yield width, hit, of_width * of_hit * hit**hits * (1 - hit) ** (count - hits)


def _count() -> int:
    return round((_ABOVE - _BELOW) / _STEP)


def _grid() -> Array:
    import numpy as np

    grid: Array = _BELOW + _STEP * np.arange(_count(), dtype=np.float64)
    return grid


def _likelihood(probes: _Probes, width: float, hit: float) -> Array:
    """Return the likelihood of each undisturbed log speed on the grid around the fastest probe."""
    import numpy as np

    found = np.ones(_count())
    grid = probes.fastest + _grid()
    for log_speed in probes.turns.values():
        slowed = grid - log_speed
        near = np.exp(-((slowed / width) ** 2) / 2)
        far = np.where(slowed > 0, np.exp(-np.maximum(slowed, 0) / _HIT_BY), near) / _HIT_BY
        found *= (1 - hit) * near / (width * math.sqrt(2 * math.pi)) + hit * far
    if probes.searched is not None:
        found *= _either_way(grid - probes.searched, *_of_search(width, hit))
    return found


def _likelihood_of_ratios(
    plan: _Probes, other: _Probes, apart: Array, width: float, hit: float
) -> Array:
    """Return the likelihood of each log ratio, where what slows a plan slows its whole round.

    As a density of the speeds themselves, so that it compares with `_likelihood`: a round is slower
    than the fastest by an exponential variable.
    """
    import numpy as np

    both = sorted(plan.turns.keys() & other.turns.keys())
    found = np.ones_like(apart)
    for at in both:
        found *= _either_way(plan.turns[at] - other.turns[at] - apart, width, hit)
    levels = [other.turns[at] for at in both]
    if plan.searched is not None and other.searched is not None:
        error = _of_search(width, hit)
        found *= _either_way(plan.searched - other.searched - apart, *error)
        levels.append(other.searched)
    if not levels:
        return np.zeros_like(apart)
    slower = sum(max(levels) - level for level in levels)
    return found * math.exp(-slower / _HIT_BY) / _HIT_BY ** (len(levels) - 1) / len(levels)


def _of_search(width: float, hit: float) -> tuple[float, float]:
    return math.hypot(width, _SEARCHED_WIDTH), max(hit, _SEARCHED_HIT)


def _either_way(error: Array, width: float, hit: float) -> Array:
    """Return the density of errors that a hit makes larger or smaller."""
    import numpy as np

    near = np.exp(-((error / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
    density: Array = (1 - hit) * near + hit * np.exp(-np.abs(error) / _HIT_BY) / (2 * _HIT_BY)
    return density


def _estimate(values: Array, density: Array) -> Estimate:
    import numpy as np

    below = np.cumsum(density)
    outside = (1 - CONFIDENCE) / 2
    shares = np.array((0.5, outside, 1 - outside))
    middle, low, high = np.interp(shares * below[-1], below, values).tolist()
    return Estimate(middle, low, high)
