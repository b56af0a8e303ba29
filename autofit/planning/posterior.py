"""The posterior of a search: the micro-batches that fit and the speeds of every variant.

A posterior is a function of the specification and the probes alone. It is represented by draws of
all memory lines and time lines (`autofit.planning.curves`). Derived values are computed once and
cached, so keep the object for several decisions after the same probes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autofit.measurement import (
    Measurement,
    Noise,
    Outcome,
    StartUp,
    Trial,
    TrialKind,
    seconds_of,
)
from autofit.plan import Plan, Settings, VariantKey, variant_key
from autofit.planning.constants import (
    CEILING_MARGIN,
    DRAWS,
    LEAST_GROWING,
    LEAST_SPREAD,
    MEMORY_ERROR,
    MEMORY_PRIOR,
    MOST_VARIANTS,
    NO_SPEED,
    PREDICTED_TIME_PRIOR,
    SURVEY_DRAWS,
    SURVEYED_LEADERS,
    TIME_PRIOR,
)
from autofit.planning.curves import (
    Departures,
    Hints,
    LineDraws,
    LineFamily,
    Point,
    spread_of,
)
from autofit.planning.feasibility import Exclusions, MicroBatches, Sizes, exclusions_of, trusted
from autofit.planning.least_squares import Array
from autofit.planning.search_spec import MemoryLine, SearchSpec

Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """The variants that a posterior's arrays have a column for, and what is known of each before.

    Attributes:
        variants: the settings of each.
        index: the column of each.
        largest_micro_batches: (variants), the largest micro-batch of each one's plans.
        trial_costs_s: (variants), the extra seconds of a probe of each.
        values: (settings, variants), the place of each one's value among those of the setting.
        memory, time: the prior of bytes and of seconds over micro-batch.
    """

    variants: list[Settings]
    index: Mapping[VariantKey, int]
    largest_micro_batches: MicroBatches
    trial_costs_s: Array
    values: NDArray[np.intp]
    memory: LineFamily
    time: LineFamily

    def among(self, few: NDArray[np.intp]) -> Columns:
        """Return these columns alone."""
        variants = [self.variants[column] for column in few]
        return Columns(
            variants,
            {variant_key(settings): column for column, settings in enumerate(variants)},
            self.largest_micro_batches[few],
            self.trial_costs_s[few],
            self.values[:, few],
            self.memory.among(few),
            self.time.among(few),
        )


class Given:
    """What follows from the specification alone, whatever was probed: found once for a search.

    Attributes:
        index: the place of each variant among all.
    """

    def __init__(self, spec: SearchSpec) -> None:
        self._spec = spec
        self._variants: list[Settings] = list(spec.space.variants())
        self.index: dict[VariantKey, int] = {
            variant_key(settings): index for index, settings in enumerate(self._variants)
        }

    @cached_property
    def columns(self) -> Columns:
        """One for every variant."""
        space, variants = self._spec.space, self._variants
        times = self._by_index(self._spec.predicted_times)
        largest = [space.largest_micro_batch_of(settings) for settings in variants]
        costs_s = [space.trial_cost_s(settings) for settings in variants]
        values = [
            [dimension.values.index(settings[name]) for settings in variants]
            for name, dimension in space.dimensions.items()
        ]
        return Columns(
            variants,
            self.index,
            np.array(largest),
            np.array(costs_s),
            np.array(values, dtype=np.intp).reshape(-1, len(variants)),
            LineFamily(
                variants,
                space.dimensions,
                MEMORY_PRIOR,
                slope_hints=self.hints("bytes_per_sample"),
                intercept_hints=self.hints("fixed_bytes"),
                lines=self.predicted_lines,
            ),
            LineFamily(
                variants,
                space.dimensions,
                PREDICTED_TIME_PRIOR if times else TIME_PRIOR,
                slope_hints=self.hints("seconds_per_sample"),
                lines=times,
            ),
        )

    @cached_property
    def predicted_lines(self) -> Mapping[int, MemoryLine]:
        """Predicted memory lines by the place of the variant."""
        return self._by_index(self._spec.predicted_lines)

    def hints(self, field: str) -> Hints:
        """Return that field of the hints of all values."""
        return {
            (name, value): factor
            for name, dimension in self._spec.space.dimensions.items()
            for value, hint in dimension.hints.items()
            if (factor := getattr(hint, field)) is not None and factor > 0
        }

    def _by_index(self, lines: Mapping[VariantKey, MemoryLine]) -> Mapping[int, MemoryLine]:
        """Return predicted lines by variant index; empty without the plain variant's.

        Lines with a coefficient that has no logarithm are left out.
        """
        found = {
            index: line
            for key, index in self.index.items()
            if (line := lines.get(key)) is not None and min(line) > 0
        }
        return found if 0 in found else {}


class Posterior:
    """The posterior of a space after some trials.

    Attributes:
        spec: the specification of the search.
        measured: the trials that were run, less accidents of an ill machine.
        in_flight: trials that are believed, not measured; see `autofit.planning.planner.believing`.
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

    @cached_property
    def of_search(self) -> Posterior:
        """The posterior without the turns of the final comparison."""
        searched = [t for t in self.measured if t.kind is not TrialKind.CONFIRMATION]
        return Posterior(self.spec, searched, given=self.given)

    def about(self, plans: Sequence[Plan]) -> Posterior:
        """Return the posterior with columns for these plans: this one if it has them."""
        if all(plan.variant in self.columns.index for plan in plans):
            return self
        return Posterior(self.spec, self.measured, self.in_flight, self.given, plans)

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
        return self.columns.time.draws(self._time_points, self.draws, self.seed + 10, self.spread)

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the log of a plan's mean step time around its line."""
        points, spread = self._time_points, LEAST_SPREAD
        noise, log_y = np.array([p.error for p in points]), np.log([p.y for p in points])
        for _ in range(2) if points else ():  # a line that is bent less leaves more around it
            spread = spread_of(log_y - self.columns.time.likeliest(points, spread), noise)
        return spread

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
        found = self._of_fitting.get(plan)
        return self._log_speeds_of([plan])[:, 0] if found is None else found[0]

    def mean_log_speed(self, plan: Plan) -> float:
        """Return the expected log of the plan's samples per second."""
        found = self._of_fitting.get(plan)
        return float(self.log_speed(plan).mean()) if found is None else found[1]

    @cached_property
    def leader(self) -> Trial | None:
        """The trial whose plan, among those that ran and fit, is expected to be fastest.

        Expected by the lines and all measurements: while a search goes on, one probe tells less.
        """
        return max(self.fitting, key=lambda t: self.mean_log_speed(t.plan), default=None)

    @cached_property
    def _of_fitting(self) -> Mapping[Plan, tuple[Array, float]]:
        """`log_speed` and `mean_log_speed` of the plans of `fitting`, all at once."""
        plans = list(dict.fromkeys(trial.plan for trial in self.fitting))
        drawn = self._log_speeds_of(plans)
        return dict(zip(plans, zip(drawn.T, drawn.mean(axis=0).tolist(), strict=True), strict=True))

    def _log_speeds_of(self, plans: Sequence[Plan]) -> Array:
        """Return (draws, plans): `log_speed` of each."""
        sizes = np.array([plan.micro_batch for plan in plans])
        return self.log_speeds(sizes, np.array([self.index(plan) for plan in plans], dtype=np.intp))

    @cached_property
    def start_up_s(self) -> Array:
        """(variants): seconds before the first step of a training with costly settings, else 0.

        What a training takes that finds its compiled code in torch's cache, where that was
        measured, as in a second worker; else the most that was.
        """
        start_up_s = self.columns.trial_costs_s.copy()
        measured: dict[int, list[Measurement]] = {}
        for trial in self.fitting if start_up_s.any() else ():
            measured.setdefault(self.index(trial.plan), []).append(trial.measurement)
        for index, own in measured.items():
            seen_s = StartUp.of(own).own_s
            if start_up_s[index] > 0 and seen_s is not None:
                start_up_s[index] = seen_s
        return start_up_s

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
        costly = {name for name, dimension in dimensions.items() if dimension.is_costly}
        # And those that are allowed only beside such
        costly |= {n for n, d in dimensions.items() if not costly.isdisjoint(d.when or {})}
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

        It is `MEMORY_ERROR` of what is not known to be fixed, or that of rounding up to segments
        where that is more.
        """
        return max(self._own_error(held_bytes), math.sqrt(self._rounding(held_bytes)))

    def _own_error(self, held_bytes: float) -> float:
        fixed = min(self._fixed_bytes.values(), default=0)
        return MEMORY_ERROR * max(LEAST_GROWING, 1 - fixed / held_bytes)

    def reading_error(self, held_bytes: float) -> float:
        """Return the error of the log of a line's bytes as one probe tells them.

        It is smaller than `memory_error` where what was allocated tells what segments hide.
        """
        return self._weigh(held_bytes)[1]

    def _rounding(self, held_bytes: float) -> float:
        """Return the variance of the log of held bytes that rounding up to whole segments causes.

        Rounding is uniform within a segment, or within all that is held if that is less.
        """
        return (min(self.spec.segment_bytes, held_bytes) / held_bytes) ** 2 / 12

    def oom_risk(self, plan: Plan) -> float:
        """Return the probability that a probe of the plan runs out of memory."""
        return float((self.memory_limit[:, self.index(plan)] < plan.micro_batch).mean())

    @cached_property
    def typical_noise(self) -> float:
        """The median of all probes' noise; 0 if nothing was timed."""
        return statistics.median([point.error for point in self._time_points] or [0.0])

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
            if trial.plan in refuted and outcome is Outcome.OK:
                continue
            is_exact = outcome in (Outcome.OK, Outcome.OVER_BUDGET) and bool(held)
            # Of what ran out while other processes used part of the budget, it needs what it held.
            known = held if is_exact or trial.measurement.contended else self.spec.vram_budget_bytes
            if known and (is_exact or outcome.about_memory):
                y, error = float(known), self.memory_error(known)
                if is_exact:
                    y, error = self._even(trial.measurement, y)
                x = float(trial.plan.micro_batch)
                points.append(Point(self.index(trial.plan), x, y, error, at_least=not is_exact))
        fixed = self._fixed_bytes.items()
        return points + [Point(v, 0.0, y, MEMORY_ERROR, at_least=True) for v, y in fixed]

    @cached_property
    def _fixed_bytes(self) -> Mapping[int, int]:
        """The bytes that are known to be fixed, by variant."""
        fixed: dict[int, int] = {}
        for trial in self.measured:
            if known := trial.measurement.least_held_bytes:
                index = self.index(trial.plan)
                fixed[index] = min(known, fixed.get(index, known))
        return fixed

    def _even(self, measured: Measurement, held: float) -> tuple[float, float]:
        """Return bytes held that grow evenly with the micro-batch, and the error of their log.

        What is held grows in segments, what is allocated does not. Where a segment is a large part
        of what is held, this is mostly what probes that allocate as much usually hold.
        """
        expected = self._expected(measured)
        if not expected:
            return held, self.memory_error(held)
        usual = expected * self._usual_factor + (measured.non_torch_bytes or 0)
        share, error = self._weigh(held)
        return held ** (1 - share) * usual**share, error

    def _weigh(self, held_bytes: float) -> tuple[float, float]:
        """Return the weight of what is usual beside what a probe held, and the error of their mean.

        What is usual is a mean over probes, this one among them: they share part of the rounding.
        """
        rounding = self._rounding(held_bytes)
        shared = rounding / max(1, len(self._held_over_expected))
        own = self._own_error(held_bytes)
        share = (rounding - shared) / (rounding - shared + own**2)
        return share, max(own, math.sqrt((1 - share) * rounding + share * shared))

    @cached_property
    def _held_over_expected(self) -> Sequence[float]:
        """Of each probe that ran, the bytes reserved over those expected of what it allocated."""
        ran = [
            trial.measurement
            for trial in self.probes
            if trial.measurement.outcome in (Outcome.OK, Outcome.OVER_BUDGET)
        ]
        pairs = [(measured.peak_reserved_bytes, self._expected(measured)) for measured in ran]
        return [reserved / expected for reserved, expected in pairs if reserved and expected]

    @cached_property
    def _usual_factor(self) -> float:
        return statistics.geometric_mean(self._held_over_expected)

    def _expected(self, measured: Measurement) -> float:
        """Return the bytes allocated and half a segment, or half of what is reserved if less.

        0: they are unknown.
        """
        allocated, reserved = measured.peak_allocated_bytes, measured.peak_reserved_bytes
        if not allocated or not reserved:
            return 0.0
        return allocated + min(self.spec.segment_bytes, reserved) / 2

    @cached_property
    def _time_points(self) -> list[Point]:
        return [
            Point(
                self.index(trial.plan),
                trial.plan.mean_micro_batch,
                seconds_of(trial),
                self.errors.of(trial),
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
        costly = self.columns.trial_costs_s > 0
        groups = np.array([~costly, costly])
        # Log speed at the ceiling; where nothing fits, how little is held
        promise = NO_SPEED - np.log(self.memory.value_at(self.sizes.smallest))
        if self.fitting:
            speeds = self.log_speeds(self.ceilings)
            promise = np.where(np.isfinite(speeds), speeds, promise)
        promise = np.where(self.usable, promise, -np.inf)
        found = shortlist(promise, groups, self.columns.values)
        beside = costly & self.beside(self.cheap_leaders(SURVEYED_LEADERS))
        ran = [0, *(self.index(trial.plan) for trial in self.probes)]
        found = np.unique(np.concatenate([found, np.flatnonzero(beside), ran]))
        return np.union1d(found, self._of_other_splits(found)).astype(np.intp)

    def _of_other_splits(self, columns: NDArray[np.intp]) -> list[int]:
        """Return the variants that those become in a plan of one micro-batch, and of many."""
        space = self.spec.space
        if not any(dimension.accumulation for dimension in space.dimensions.values()):
            return []
        sizes = 1, space.largest_micro_batch
        plans = [space.plan(size, self.variants[at]) for at in columns for size in sizes]
        return [self.index(plan) for plan in plans]


def shortlist(
    promise: Array, groups: NDArray[np.bool_], values: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Return the variants that a draw names in some group, and the best of every value.

    Args:
        promise: (draws, variants), larger for a better variant; -inf for one that may not be run.
        groups: (groups, variants), which variants are named together.
        values: (settings, variants), the place of each one's value in its setting.
    """
    named = [_best(np.where(group, promise, -np.inf)) for group in groups]
    order = np.argsort(-promise.mean(axis=0), kind="stable")
    firsts = [order[np.unique(places[order], return_index=True)[1]] for places in values]
    return np.unique(np.concatenate([*named, *firsts]))


def _best(promise: Array) -> NDArray[np.intp]:
    """Return the variants that some draw names, those excluded left out."""
    most = min(MOST_VARIANTS // SURVEY_DRAWS, promise.shape[1])
    named = np.argpartition(-promise, most - 1, axis=1)[:, :most]
    best: NDArray[np.intp] = named[np.take_along_axis(promise, named, axis=1) > -np.inf]
    return best
