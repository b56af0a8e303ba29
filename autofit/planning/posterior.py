"""The posterior of a search: the micro-batches that fit and the speeds of every variant.

A posterior is a function of the specification and the probes alone. It is represented by draws of
all memory lines and time lines (`autofit.planning.curves`). Derived values are computed once and
cached, so keep the object for several decisions after the same probes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autofit.measurement import Noise, Outcome, Trial, TrialKind, oom_probes_of, seconds_of
from autofit.plan import Dimension, Plan, Settings, VariantKey
from autofit.planning.columns import Columns, Given
from autofit.planning.curves import Freedom, LineDraws, Point
from autofit.planning.departures import LEAST, Departures, spread_of
from autofit.planning.feasibility import (
    Exclusions,
    MicroBatches,
    Sizes,
    exclusions_of,
    trusted,
)
from autofit.planning.least_squares import Array
from autofit.planning.search_spec import SearchSpec
from autofit.planning.shortlist import MOST_VARIANTS, SURVEY_DRAWS, shortlist

Mask: TypeAlias = NDArray[np.bool_]

DRAWS = 160
_MEMORY_ERROR = 0.02
"""Least standard deviation of the log of held bytes, around the line of the variant."""

CEILING_MARGIN = 0.8
"""The log margin below the budget at a ceiling, in standard deviations of what a probe holds: about
80 % of its probes then fit."""

_SURVEYED_LEADERS = 4  # costly values beside so many of the fastest are on a shortlist
_HOPELESS = -1000.0  # the log of a speed that no plan has

_REGIMES = [
    (odds * others, Freedom(power, uneven, max(fixed, factor), factor))
    for others, power, fixed in ((1.0, 1.0, 1.0), (0.5, 4.0, 5.0))
    for odds, uneven, factor in ((1.0, 0.0, 1.0), (0.2, 0.08, 1.0), (0.2, 0.03, 3.0))
]
"""The ways in which step times may follow from the settings and the micro-batch, each with its odds
beforehand. Where launches overlap kernels, a small micro-batch takes as long as its launches: it
tells little of larger ones, and settings differ in how much they launch."""


class Posterior:
    """The posterior of a space after some trials.

    Attributes:
        spec: the specification of the search.
        measured: the trials that were run, less accidents of an ill machine.
        in_flight: trials that are believed, not measured; see `autofit.planning.in_flight`.
        given: what other posteriors of the specification use too.
        probes: both.
    """

    draws = DRAWS

    def __init__(
        self,
        spec: SearchSpec,
        trials: Sequence[Trial],
        in_flight: Sequence[Trial] = (),
        given: Given | None = None,
        asked: Sequence[Plan] = (),
    ) -> None:
        self.spec, self.in_flight = spec, tuple(in_flight)
        self.given, self._asked = given or Given(spec), asked
        self.measured = [t for t in trusted(trials) if t.plan.variant in self.given.index]
        self.probes = [*self.measured, *self.in_flight]

    def updated(self, trials: Sequence[Trial]) -> Posterior:
        """Return the posterior after those trials: this one if they hold the same probes."""
        fresh = Posterior(self.spec, trials, given=self.given)
        return self if fresh.probes == self.probes else fresh

    def about(self, plans: Sequence[Plan]) -> Posterior:
        """Return the posterior with columns for these plans: this one if it has them."""
        if all(plan.variant in self.columns.index for plan in plans):
            return self
        return Posterior(self.spec, self.measured, self.in_flight, self.given, plans)

    @property
    def variant_keys(self) -> Collection[VariantKey]:
        """The variants that plans may have."""
        return self.given.index.keys()

    @cached_property
    def columns(self) -> Columns:
        """The variants that arrays have a column for: all of a small space, else a shortlist."""
        every = self.given.columns
        if len(every.variants) <= MOST_VARIANTS:
            return every
        survey = _Survey(self.spec, self.measured, self.in_flight, self.given)
        asked = [self.given.index[plan.variant] for plan in self._asked]
        return every.among(np.union1d(survey.shortlist(), asked).astype(np.intp))

    @property
    def variants(self) -> list[Settings]:
        """The settings of every column."""
        return self.columns.variants

    def index(self, plan: Plan) -> int:
        """Return the column of the plan's variant."""
        return self.columns.index[plan.variant]

    @cached_property
    def exclusions(self) -> Exclusions:
        """Exclusions that follow from faults of earlier probes."""
        return exclusions_of(self.spec, self.probes)

    @cached_property
    def sizes(self) -> Sizes:
        """The micro-batches that may be run."""
        space, least = self.spec.space, self.exclusions.least
        fewest = [max(least(each), space.smallest_micro_batch_of(each)) for each in self.variants]
        return Sizes(space, fewest)

    @cached_property
    def bound(self) -> MicroBatches:
        """(variants): the largest micro-batch that no probe has ruled out."""
        largest = self.columns.largest_micro_batches
        bounds = zip(largest.tolist(), map(self.exclusions.bound, self.variants), strict=True)
        return np.array([own if bound is None else min(own, bound) for own, bound in bounds])

    @cached_property
    def usable(self) -> Mask:
        """(variants): whether no fault excludes the variant."""
        return np.array([self.exclusions.why(settings) is None for settings in self.variants])

    @cached_property
    def fitting(self) -> list[Trial]:
        """The probes that ran within the budget and that no other probe contradicts."""
        last = {trial.plan: trial for trial in self.probes if trial.kind is TrialKind.CONFIRMATION}
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
    def oom_probes(self) -> int:
        """How many probes ran out of memory."""
        return oom_probes_of(self.probes)

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
        return self.columns.memory.draws(self._memory_points(), self.draws, self.seed)

    @cached_property
    def time(self) -> LineDraws:
        """Seconds of one micro-batch over its size, departures left out."""
        probabilities, spreads = self._regimes
        shares = np.diff(np.round(self.draws * np.cumsum([0.0, *probabilities])).astype(int))
        parts = [
            (replace(freedom, spread=spread), int(count), self.seed + 10 * index)
            for index, ((_, freedom), spread, count) in enumerate(
                zip(_REGIMES, spreads, shares, strict=True), start=1
            )
        ]
        return self.columns.time.mixed_draws(self._time_points, parts)

    @property
    def spread(self) -> float:
        """Standard deviation of the log of a plan's mean step time around its line."""
        probabilities, spreads = self._regimes
        return spreads[int(np.argmax(probabilities))]

    @cached_property
    def _regimes(self) -> tuple[Array, list[float]]:
        """The probability of each regime, and the spread around its lines."""
        log_odds = np.log([odds for odds, _ in _REGIMES])
        spreads = [LEAST] * len(_REGIMES)
        points = self._time_points
        if points:
            noise, log_y = np.array([p.error for p in points]), np.log([p.y for p in points])
            fitted = self.columns.time.fits(points, [freedom for _, freedom in _REGIMES])
            found = fitted(spreads, None)
            for _ in range(2):
                spreads = [spread_of(log_y - line, noise) for line in found.log_y]
                found = fitted(spreads, found)
            log_odds += found.log_evidence
        odds = np.exp(log_odds - log_odds.max())
        return odds / odds.sum(), spreads

    @cached_property
    def departures(self) -> Departures:
        """Departures of step times from the lines of `time`."""
        points = self._time_points
        of = np.array([point.variant for point in points])
        expected = self.time.log_values_of(of, np.array([point.x for point in points]))
        residuals = np.log([point.y for point in points]) - expected
        return Departures(points, residuals, self.spread, len(self.variants), self.seed + 3)

    @property
    def seed(self) -> int:
        """The seed of the random draws after these probes."""
        return 1000 * self.spec.seed + len(self.probes)

    def log_speeds(
        self, micro_batches: MicroBatches, variants: NDArray[np.intp] | None = None
    ) -> Array:
        """(draws, variants): log of samples per second at those micro-batches.

        Args:
            micro_batches: one per variant, or one per draw and variant; the result is -inf at 0.
            variants: the columns of the variants; None: all.
        """
        if variants is None:
            variants = np.arange(len(self.variants))
        size = np.maximum(micro_batches, 1)
        space = self.spec.space
        share = space.samples_per_rank or size  # of the rank with most, whose time counts
        steps = 1 if space.samples_per_rank is None else np.ceil(share / size)
        x = np.broadcast_to(share / steps, np.atleast_2d(size).shape)
        log_samples = np.log((space.global_batch or size * space.world_size) / steps)
        line = log_samples - self.time.log_values_of(variants, x)
        if self._time_points:
            line = line - self.departures.of(variants, np.log(x))
        line = self.over_training(line, self.start_up_s[variants])
        return np.where(micro_batches >= 1, line, -np.inf)

    def log_speed(self, plan: Plan) -> Array:
        """(draws,): log of the plan's samples per second, its own measurements included."""
        at = self._column_of.get(plan)
        return self._log_speeds_of([plan])[:, 0] if at is None else self._of_fitting[:, at]

    def mean_log_speed(self, plan: Plan) -> float:
        """Return the expected log of the plan's samples per second."""
        at = self._column_of.get(plan)
        return float(self.log_speed(plan).mean() if at is None else self._mean_of_fitting[at])

    @cached_property
    def leader(self) -> Trial | None:
        """The trial whose plan, among those that ran and fit, is expected to be fastest.

        Expected by the lines and all measurements: while a search goes on, one probe tells less.
        """
        return max(self.fitting, key=lambda t: self.mean_log_speed(t.plan), default=None)

    @cached_property
    def _column_of(self) -> Mapping[Plan, int]:
        plans = dict.fromkeys(trial.plan for trial in self.fitting)
        return {plan: column for column, plan in enumerate(plans)}

    @cached_property
    def _of_fitting(self) -> Array:
        """(draws, plans): `log_speed` of the plans of `fitting`, all at once."""
        return self._log_speeds_of(list(self._column_of))

    @cached_property
    def _mean_of_fitting(self) -> Array:
        mean: Array = self._of_fitting.mean(axis=0)
        return mean

    def _log_speeds_of(self, plans: Sequence[Plan]) -> Array:
        """Return (draws, plans): `log_speed` of each."""
        sizes = np.array([plan.micro_batch for plan in plans])
        return self.log_speeds(sizes, np.array([self.index(plan) for plan in plans], dtype=np.intp))

    @cached_property
    def start_up_s(self) -> Array:
        """(variants): seconds before the first step of a training with costly settings, else 0.

        The most that was measured: what a compiler has done once it remembers.
        """
        start_up_s = self.trial_costs_s.copy()
        measured: dict[int, float] = {}
        for trial in self.fitting if start_up_s.any() else ():
            index, seen_s = self.index(trial.plan), trial.measurement.start_up_s
            if start_up_s[index] > 0 and seen_s is not None:
                measured[index] = max(measured.get(index, 0.0), seen_s)
        start_up_s[list(measured)] = list(measured.values())
        return start_up_s

    @property
    def trial_costs_s(self) -> Array:
        """(variants): the extra seconds of a probe of each."""
        return self.columns.trial_costs_s

    def over_training(self, log_speed: Array, start_up_s: Array | float) -> Array:
        """Return the log of samples/s over the whole training, its start included.

        The same where it is not known how long that is.
        """
        samples = self.spec.planned_samples
        if samples is None or not np.any(start_up_s):
            return log_speed
        slower: Array = np.log1p(start_up_s * np.exp(log_speed) / samples)
        return log_speed - slower

    @cached_property
    def ceilings(self) -> MicroBatches:
        """(draws, variants): the largest micro-batch with room to spare; 0 if there is none."""
        budget = float(self.spec.vram_budget_bytes)
        budget *= math.exp(-CEILING_MARGIN * self.memory_error(budget))
        return self.sizes.down(np.minimum(self.memory.x_at(budget), self.bound))

    def cheap_leaders(self, count: int) -> list[int]:
        """Return so many of the fastest variants that fit and have no costly values."""
        space = self.spec.space
        cheap = [t for t in self.probes if t.ok and not space.is_costly(t.plan.settings)]
        cheap.sort(key=lambda trial: -self.mean_log_speed(trial.plan))
        return list(dict.fromkeys(self.index(trial.plan) for trial in cheap))[:count]

    def beside(self, columns: Sequence[int]) -> Mask:
        """Return which variants differ from one of these in costly values alone."""
        dimensions = self.spec.space.dimensions
        costly = _not_cheap(dimensions)
        rests = self.columns.values[[name not in costly for name in dimensions]]
        beside: Mask = (rests[:, :, None] == rests[:, None, columns]).all(axis=0).any(axis=1)
        return beside

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
        return bool(self.given.predicted_lines)

    @cached_property
    def has_prior_memory(self) -> bool:
        """Whether every variant has prior information on its memory: predicted lines or hints."""
        hinted = self.given.hints("bytes_per_sample")
        values = {
            (name, value)
            for name, dimension in self.spec.space.dimensions.items()
            for value in dimension.values[1:]
        }
        by_hints = bool(values) and values <= hinted.keys()
        return by_hints or len(self.given.predicted_lines) == len(self.given.index)

    @cached_property
    def memory_limit(self) -> Array:
        """(draws, variants): the micro-batch at which a noisy probe just fits the budget."""
        noise = np.random.default_rng(self.seed + 2).standard_normal((self.draws, 1))
        budget = self.spec.vram_budget_bytes
        return self.memory.x_at(budget * np.exp(self.memory_error(budget) * noise))

    def memory_error(self, held_bytes: float) -> float:
        """Return the standard deviation of the log of what a probe holds, around its line.

        Where little is held, that of what whole segments round up: uniform within one, or within
        all that is held.
        """
        segment_bytes = min(self.spec.segment_bytes, held_bytes)
        return max(_MEMORY_ERROR, segment_bytes / math.sqrt(12) / held_bytes)

    def oom_risk(self, plan: Plan) -> float:
        """Return the probability that a probe of the plan runs out of memory."""
        return float((self.memory_limit[:, self.index(plan)] < plan.micro_batch).mean())

    def noise(self, trial: Trial) -> float:
        """Return the standard deviation of the log of a probe's step time; see `Noise.of`."""
        return self.errors.of(trial)

    @cached_property
    def typical_noise(self) -> float:
        """The median of all probes' noise; 0 if nothing was timed."""
        return statistics.median([point.error for point in self._time_points] or [0.0])

    @property
    def repeated(self) -> list[list[Trial]]:
        """The timed probes of each plan that was timed more than once."""
        return self.errors.repeated

    @cached_property
    def errors(self) -> Noise:
        """The errors of all probes."""
        return Noise(self.probes)

    def _memory_points(self) -> list[Point]:
        points = []
        refuted = {
            trial.plan
            for trial in self.probes
            if trial.kind is TrialKind.CONFIRMATION and trial.measurement.outcome.about_memory
        }
        for trial in self.probes:
            outcome, held = trial.measurement.outcome, trial.measurement.held_bytes
            variant, x = self.index(trial.plan), float(trial.plan.micro_batch)
            if trial.plan in refuted and outcome is Outcome.OK:
                continue
            if outcome in (Outcome.OK, Outcome.OVER_BUDGET) and held:
                points.append(Point(variant, x, float(held), self.memory_error(held)))
            elif outcome.about_memory and not trial.measurement.contended:
                budget = float(self.spec.vram_budget_bytes)
                points.append(Point(variant, x, budget, self.memory_error(budget), at_least=True))
            elif outcome.about_memory and held:  # other processes used part of the budget
                points.append(
                    Point(variant, x, float(held), self.memory_error(held), at_least=True)
                )
        return points

    @cached_property
    def _time_points(self) -> list[Point]:
        return [
            Point(
                self.index(trial.plan),
                trial.plan.mean_micro_batch,
                seconds_of(trial),
                self.noise(trial),
            )
            for trial in self.probes
            if trial.measurement.step_times_s
        ]


class _Survey(Posterior):
    """Few draws of all variants, which say what a posterior of a large space has columns for."""

    draws = SURVEY_DRAWS

    @property
    def columns(self) -> Columns:
        return self.given.columns

    def shortlist(self) -> NDArray[np.intp]:
        """Return the variants worth a column, those that ran among them."""
        costly = self.trial_costs_s > 0
        groups = np.array([~costly, costly])
        found = shortlist(self._promise(), groups, self.columns.values)
        beside = costly & self.beside(self.cheap_leaders(_SURVEYED_LEADERS))
        ran = [0, *(self.index(trial.plan) for trial in self.probes)]
        found = np.unique(np.concatenate([found, np.flatnonzero(beside), ran]))
        return np.union1d(found, self._of_other_splits(found)).astype(np.intp)

    def _promise(self) -> Array:
        """(draws, variants): log speed at the ceiling; where nothing fits, how little is held."""
        promise = _HOPELESS - np.log(self.memory.value_at(self.sizes.smallest))
        if self.fitting:
            speeds = self.log_speeds(self.ceilings)
            promise = np.where(np.isfinite(speeds), speeds, promise)
        return np.where(self.usable, promise, -np.inf)

    def _of_other_splits(self, columns: NDArray[np.intp]) -> list[int]:
        """Return the variants that those become in a plan of one micro-batch, and of many."""
        space = self.spec.space
        if not any(dimension.accumulation for dimension in space.dimensions.values()):
            return []
        sizes = 1, space.largest_micro_batch
        plans = [space.plan(size, self.variants[at]) for at in columns for size in sizes]
        return [self.index(plan) for plan in plans]


def _not_cheap(dimensions: Mapping[str, Dimension]) -> set[str]:
    """Return the settings with costly values, and those that are allowed only beside such."""
    costly = {name for name, dimension in dimensions.items() if dimension.is_costly}
    beside = {n for n, d in dimensions.items() if not costly.isdisjoint(d.when or {})}
    return costly | beside
