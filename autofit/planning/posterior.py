"""The posterior of a search: the micro-batches that fit and the speeds of every variant.

A posterior is a function of the specification and the probes alone. It is represented by draws of
all memory lines and time lines (`autofit.planning.curves`). Derived values are computed once and
cached, so keep the object for several decisions after the same probes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autofit.measurement import Outcome, Role, Trial
from autofit.plan import Plan, Settings, VariantKey, variant_key
from autofit.planning.curves import (
    Hints,
    LineDraws,
    LineFamily,
    LinePrior,
    Point,
)
from autofit.planning.departures import LEAST, Departures, spread_of
from autofit.planning.feasibility import (
    Exclusions,
    MicroBatches,
    Sizes,
    exclusions_of,
    trusted,
)
from autofit.planning.least_squares import Array, added
from autofit.planning.search_spec import MemoryLine, SearchSpec

DRAWS = 160
MEMORY_ERROR = 0.02
"""Standard deviation of the log of the bytes that a probe holds, around the variant's line."""

_LEAST_NOISE = 0.002  # perfectly regular steps still do not predict the next probe exactly
_SIMILAR = 1.5  # step times within this factor of each other are assumed to be equally noisy
_MEMORY_PRIOR = LinePrior(trend=0.7, curvature=0.4)
_TIME_PRIOR = LinePrior(trend=0.3, curvature=0.15)
_PREDICTED_TIME_PRIOR = replace(
    _TIME_PRIOR,
    intercept=0.2,
    predicted_level=1.0,
    predicted_intercept=2.5,  # a roofline knows of no launches
    predicted_slope=0.08,
    own_share=0.12,
    common_share=0.25,
)
"""The roofline of a model is off by any factor, and by a share of each setting's effect: on the two
recorded grids by 0.1 to 0.4 of a precision's, by 0.3 at most of a checkpoint level's."""


@dataclass(frozen=True)
class _Regime:
    """One of the ways in which step times may follow from the settings and the micro-batch.

    Attributes:
        odds: the probability beforehand, up to a factor.
        power: of the sum of fixed and growing time; see `autofit.planning.curves.added`.
        uneven: standard deviation of the effect of a size that is no multiple of 2, 4 or 8.
        fixed: by how much the deviations of effects on fixed times are multiplied.
        interaction: likewise of interactions.
    """

    odds: float
    power: float
    uneven: float
    fixed: float
    interaction: float

    def prior(self, usual: LinePrior) -> LinePrior:
        """Return the prior of lines in this regime."""
        return replace(
            usual,
            uneven=self.uneven,
            intercept=self.fixed * usual.intercept,
            interaction=self.interaction * usual.interaction,
        )


_REGIMES = [
    _Regime(odds * others, power, uneven, max(fixed, factor), factor)
    for others, power, fixed in ((1.0, 1.0, 1.0), (0.5, 4.0, 5.0))
    for odds, uneven, factor in ((1.0, 0.0, 1.0), (0.2, 0.08, 1.0), (0.2, 0.03, 3.0))
]
"""Where launches overlap kernels, a small micro-batch takes as long as its launches: it tells
little of larger ones, and settings differ in how much they launch."""


class Posterior:
    """The posterior of a space after some trials.

    Attributes:
        spec: the specification of the search.
        probes: the trials that were run, less accidents of an ill machine.
        variants: the settings of every variant; arrays have one column for each.
    """

    def __init__(self, spec: SearchSpec, trials: Sequence[Trial]) -> None:
        self.spec = spec
        self.variants: list[Settings] = list(spec.space.variants())
        self._index: dict[VariantKey, int] = {
            variant_key(settings): index for index, settings in enumerate(self.variants)
        }
        self.probes = [t for t in trusted(trials) if t.plan.variant in self._index]
        self._log_speeds: dict[Plan, Array] = {}

    def updated(self, trials: Sequence[Trial]) -> Posterior:
        """Return the posterior after those trials: this one if they hold the same probes."""
        fresh = Posterior(self.spec, trials)
        return self if fresh.probes == self.probes else fresh

    def index(self, plan: Plan) -> int:
        """Return the column of the plan's variant."""
        return self._index[plan.variant]

    @cached_property
    def exclusions(self) -> Exclusions:
        """Exclusions that follow from faults of earlier probes."""
        return exclusions_of(self.spec, self.probes)

    @cached_property
    def sizes(self) -> Sizes:
        """The micro-batches that may be run."""
        return Sizes(self.spec.space, [self.exclusions.least(v) for v in self.variants])

    @cached_property
    def bound(self) -> MicroBatches:
        """(variants): the largest micro-batch that no probe has ruled out."""
        bounds = [self.exclusions.bound(settings) for settings in self.variants]
        largest = self.spec.space.largest_micro_batch
        return np.array([largest if bound is None else bound for bound in bounds])

    @cached_property
    def usable(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """(variants): whether no fault excludes the variant."""
        return np.array([self.exclusions.why(settings) is None for settings in self.variants])

    @cached_property
    def fitting(self) -> list[Trial]:
        """The probes that ran within the budget and that no other probe contradicts."""
        last = {trial.plan: trial for trial in self.probes if trial.role is Role.CONFIRMED}
        refuted = {plan for plan, trial in last.items() if not trial.ok}
        return [
            trial
            for trial in self.probes
            if trial.ok
            and trial.plan not in refuted
            and trial.plan.micro_batch <= self.bound[self.index(trial.plan)]
            and trial.plan.micro_batch >= self.exclusions.least(trial.plan.settings)
            and self.exclusions.why(trial.plan.settings) is None
        ]

    @cached_property
    def largest(self) -> MicroBatches:
        """(variants): the largest micro-batch of `fitting`; 0 if there is none."""
        largest: MicroBatches = np.zeros(len(self.variants), dtype=np.int64)
        for trial in self.fitting:
            index = self.index(trial.plan)
            largest[index] = max(largest[index], trial.plan.micro_batch)
        return largest

    @cached_property
    def memory(self) -> LineDraws:
        """Bytes over micro-batch."""
        family = LineFamily(
            self.variants,
            self.spec.space.dimensions,
            _MEMORY_PRIOR,
            slope_hints=self._hints("bytes_per_sample"),
            intercept_hints=self._hints("fixed_bytes"),
            lines=self._predicted_lines,
        )
        return family.draws(self._memory_points(), DRAWS, self.seed)

    @cached_property
    def time(self) -> LineDraws:
        """Seconds of one micro-batch over its size, departures left out."""
        probabilities, spreads = self._regimes
        shares = np.diff(np.round(DRAWS * np.cumsum([0.0, *probabilities])).astype(int))
        return LineDraws.joined(
            [
                self._time_family(regime).draws(
                    self._spread_points(spread), int(count), self.seed + 10 * index, regime.power
                )
                for index, (regime, spread, count) in enumerate(
                    zip(_REGIMES, spreads, shares, strict=True), start=1
                )
                if count
            ]
        )

    @property
    def spread(self) -> float:
        """Standard deviation of the log of a plan's mean step time around its line."""
        probabilities, spreads = self._regimes
        return spreads[int(np.argmax(probabilities))]

    @cached_property
    def _regimes(self) -> tuple[Array, list[float]]:
        """The probability of each regime, and the spread around its lines."""
        log_odds = np.log([regime.odds for regime in _REGIMES])
        spreads = [LEAST] * len(_REGIMES)
        points = self._time_points
        if points:
            noise, log_y = np.array([p.error for p in points]), np.log([p.y for p in points])
            for index, regime in enumerate(_REGIMES):
                family = self._time_family(regime)
                for _ in range(2):
                    fitted = family.fitted(self._spread_points(spreads[index]), regime.power)
                    spreads[index] = spread_of(log_y - fitted.log_y, noise)
                fitted = family.fitted(self._spread_points(spreads[index]), regime.power)
                log_odds[index] += fitted.log_evidence
        odds = np.exp(log_odds - log_odds.max())
        return odds / odds.sum(), spreads

    @cached_property
    def departures(self) -> Departures:
        """Departures of step times from the lines of `time`."""
        points = self._time_points
        residuals = np.log([point.y for point in points]) - self.time.log_values_of(points)
        return Departures(points, residuals, self.spread, len(self.variants), self.seed + 3)

    def _time_family(self, regime: _Regime) -> LineFamily:
        lines = self._by_index(self.spec.predicted_times)
        return LineFamily(
            self.variants,
            self.spec.space.dimensions,
            regime.prior(_PREDICTED_TIME_PRIOR if lines else _TIME_PRIOR),
            slope_hints=self._hints("seconds_per_sample"),
            lines=lines,
        )

    def _spread_points(self, spread: float) -> list[Point]:
        """Return the measured times as points around lines that do not know of departures."""
        return [replace(p, error=math.hypot(p.error, spread)) for p in self._time_points]

    @property
    def seed(self) -> int:
        """The seed of the random draws after these probes."""
        return 1000 * self.spec.seed + len(self.probes)

    def log_speeds(self, micro_batches: MicroBatches) -> Array:
        """(draws, variants): log of samples per second at those micro-batches.

        Args:
            micro_batches: one per variant, or one per draw and variant; the result is -inf at 0.
        """
        size = np.maximum(micro_batches, 1)
        space = self.spec.space
        steps = 1 if space.samples_per_rank is None else np.ceil(space.samples_per_rank / size)
        samples = space.global_batch or size * space.world_size
        x = np.broadcast_to(samples / steps, np.atleast_2d(size).shape)
        log_x = np.log(x)
        line = log_x - added(self.time.intercept, self.time.slope + log_x, self.time.power)
        if self._time_points:
            line = line - self.departures.at(log_x) - self.time.unevenness(x)
        line = self.over_training(line, self.start_up_s)
        return np.where(micro_batches >= 1, line, -np.inf)

    def log_speed(self, plan: Plan) -> Array:
        """(draws,): log of the plan's samples per second, its own measurements included."""
        if plan not in self._log_speeds:
            index, x = self.index(plan), plan.samples_per_step / plan.accumulation_steps
            point = Point(index, x, 1.0, 0.0)
            seconds = self.time.log_values_of([point])[:, 0]
            departure = self.departures.of(index, math.log(x))
            log_speed = math.log(x) - seconds - departure
            self._log_speeds[plan] = self.over_training(log_speed, self.start_up_s[index])
        return self._log_speeds[plan]

    @cached_property
    def start_up_s(self) -> Array:
        """(variants): seconds before the first step of a training with costly settings, else 0.

        The most that was measured: what a compiler has done once it remembers.
        """
        space = self.spec.space
        start_up_s = np.array([space.trial_cost_s(settings) for settings in self.variants])
        measured: dict[int, float] = {}
        for trial in self.fitting if start_up_s.any() else ():
            index, seen_s = self.index(trial.plan), trial.measurement.start_up_s
            if start_up_s[index] > 0 and seen_s is not None:
                measured[index] = max(measured.get(index, 0.0), seen_s)
        start_up_s[list(measured)] = list(measured.values())
        return start_up_s

    def over_training(self, log_speed: Array, start_up_s: Array | float) -> Array:
        """Return the log of samples/s over the whole training, its start included.

        The same where it is not known how long that is.
        """
        samples = self.spec.train_samples
        if samples is None or not np.any(start_up_s):
            return log_speed
        slower: Array = np.log1p(start_up_s * np.exp(log_speed) / samples)
        return log_speed - slower

    def held_bytes(self, plan: Plan) -> Array:
        """(draws,): the bytes that the plan holds according to its line."""
        held: Array = self.memory.value_at(plan.micro_batch)[:, self.index(plan)]
        return held

    @property
    def can_predict_memory(self) -> bool:
        """Whether any held bytes were measured or predicted."""
        measured = any(not point.at_least for point in self._memory_points())
        return measured or self.has_predicted_memory

    @property
    def has_predicted_memory(self) -> bool:
        """Whether memory lines were predicted, of all variants or of some to compose them from."""
        return bool(self._predicted_lines)

    @cached_property
    def has_prior_memory(self) -> bool:
        """Whether every variant has prior information on its memory: predicted lines or hints."""
        hinted = self._hints("bytes_per_sample")
        values = {
            (name, value)
            for name, dimension in self.spec.space.dimensions.items()
            for value in dimension.values[1:]
        }
        by_hints = bool(values) and values <= hinted.keys()
        return by_hints or len(self._predicted_lines) == len(self.variants)

    @cached_property
    def memory_limit(self) -> Array:
        """(draws, variants): the micro-batch at which a noisy probe just fits the budget."""
        noise = np.random.default_rng(self.seed + 2).standard_normal((DRAWS, 1))
        return self.memory.x_at(self.spec.vram_budget_bytes * np.exp(MEMORY_ERROR * noise))

    def oom_risk(self, plan: Plan) -> float:
        """Return the probability that a probe of the plan runs out of memory."""
        return float((self.memory_limit[:, self.index(plan)] < plan.micro_batch).mean())

    def noise(self, trial: Trial) -> float:
        """Return the standard deviation of the log of the step time from probe to probe.

        Estimated as the largest of the scatter of the probe's own steps, and the median scatter of
        all probes with similar step times. A few steps alone are a poor estimate; the median
        because one probe that another process disturbed says nothing about the others. Where
        repeated probes of a plan differ by more than the median, that is so much larger; where by
        less, both are so much smaller.
        """
        excess = self._excess_noise
        own = _scatter_of_steps(trial) * min(1.0, excess)
        return max(own, self._usual_noise(trial) * excess)

    @cached_property
    def typical_noise(self) -> float:
        """The median of all probes' noise; 0 if nothing was timed."""
        return statistics.median([point.error for point in self._time_points] or [0.0])

    @cached_property
    def repeated(self) -> list[list[Trial]]:
        """The timed probes of each plan that was timed more than once."""
        by_plan: dict[Plan, list[Trial]] = {}
        for trial in self.probes:
            if trial.measurement.step_times_s:
                by_plan.setdefault(trial.plan, []).append(trial)
        return [trials for trials in by_plan.values() if len(trials) > 1]

    @cached_property
    def _excess_noise(self) -> float:
        """The factor by which probes scatter more than their steps, 1 until a plan was repeated."""
        squares, degrees = 1.0, 1
        for trials in self.repeated:
            logs = [math.log(_seconds(trial)) for trial in trials]
            noise = statistics.fmean(self._usual_noise(trial) for trial in trials)
            squares += statistics.variance(logs) * (len(logs) - 1) / noise**2
            degrees += len(logs) - 1
        return math.sqrt(squares / degrees)

    def _usual_noise(self, trial: Trial) -> float:
        similar = [
            _scatter_of_steps(other)
            for other in self.probes
            if other.measurement.step_times_s
            and 1 / _SIMILAR < _seconds(other) / _seconds(trial) < _SIMILAR
        ]
        return max(_LEAST_NOISE, statistics.median(similar))

    def _hints(self, field: str) -> Hints:
        return {
            (name, value): factor
            for name, dimension in self.spec.space.dimensions.items()
            for value, hint in dimension.hints.items()
            if (factor := getattr(hint, field)) is not None and factor > 0
        }

    @cached_property
    def _predicted_lines(self) -> Mapping[int, MemoryLine]:
        return self._by_index(self.spec.predicted_lines)

    def _by_index(self, lines: Mapping[VariantKey, MemoryLine]) -> Mapping[int, MemoryLine]:
        """Return predicted lines by variant index; empty without the plain variant's.

        Lines with a coefficient that has no logarithm are left out.
        """
        found = {
            index: line
            for key, index in self._index.items()
            if (line := lines.get(key)) is not None and min(line) > 0
        }
        return found if 0 in found else {}

    def _memory_points(self) -> list[Point]:
        points = []
        refuted = {
            trial.plan
            for trial in self.probes
            if trial.role is Role.CONFIRMED and trial.measurement.outcome.about_memory
        }
        for trial in self.probes:
            outcome, held = trial.measurement.outcome, trial.measurement.held_bytes
            variant, x = self.index(trial.plan), float(trial.plan.micro_batch)
            if trial.plan in refuted and outcome is Outcome.OK:
                continue
            if outcome in (Outcome.OK, Outcome.OVER_BUDGET) and held:
                points.append(Point(variant, x, float(held), MEMORY_ERROR))
            elif outcome.about_memory and not trial.measurement.contended:
                budget = float(self.spec.vram_budget_bytes)
                points.append(Point(variant, x, budget, MEMORY_ERROR, at_least=True))
            elif outcome.about_memory and held:  # other processes used part of the budget
                points.append(Point(variant, x, float(held), MEMORY_ERROR, at_least=True))
        return points

    @cached_property
    def _time_points(self) -> list[Point]:
        return [
            Point(
                self.index(trial.plan),
                trial.plan.samples_per_step / trial.plan.accumulation_steps,
                _seconds(trial),
                self.noise(trial),
            )
            for trial in self.probes
            if trial.measurement.step_times_s
        ]


def _scatter_of_steps(trial: Trial) -> float:
    """Return the standard deviation of the log of one probe's step times around their median."""
    times = trial.measurement.step_times_s
    middle = statistics.median(times)
    squares = sum(math.log(seconds / middle) ** 2 for seconds in times)
    return math.sqrt(squares / max(1, len(times) - 1))


def _seconds(trial: Trial) -> float:
    """Return the median seconds of one micro-batch."""
    step_time_s = trial.measurement.step_time_s
    assert step_time_s is not None
    return step_time_s / trial.plan.accumulation_steps
