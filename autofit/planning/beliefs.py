"""What is believed after some trials: which plans fit, and how fast they are.

Beliefs are a function of the specification and the trials alone, so the same trials give the same
decisions in any process. Derived values are computed once and cached, so keep the object for
several decisions after the same probes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autofit.measurement import Measurement, StartUp, Trial, TrialKind, oom_probes_of
from autofit.plan import Plan, Settings, VariantKey, variant_key
from autofit.planning.constants import (
    CAUTIOUS,
    MEMORY_PRIOR,
    ODD,
    OOM_COST,
    OPTIMISTIC,
    PREDICTED_TIME_PRIOR,
    STEP,
    STEP_WITH_LINES,
    TIME_PRIOR,
    TIME_SPREADS,
)
from autofit.planning.feasibility import Exclusions, MicroBatches, Sizes, exclusions_of, trusted
from autofit.planning.held_bytes import HeldBytes
from autofit.planning.lines import (
    Array,
    Hints,
    Indices,
    Line,
    LineFamily,
    Lines,
    LogValues,
    Reading,
)
from autofit.planning.noise import Noise, log_seconds_of
from autofit.planning.search_spec import SearchSpec

Mask: TypeAlias = NDArray[np.bool_]
Places: TypeAlias = Indices | slice | int


class Known:
    """What follows from the specification alone, whatever was probed: found once for a search.

    Attributes:
        variants: the settings of each, the plain one first.
        index: the place of each variant.
        largest_micro_batches: (variants), the largest micro-batch of each one's plans.
        whole: the micro-batch of a step without accumulation; without a global batch, more than any
            micro-batch has.
        has_choice: (variants), whether some plans of each accumulate and one does not.
        trial_costs_s: (variants), the extra seconds of a probe of each.
    """

    def __init__(self, spec: SearchSpec) -> None:
        self._spec, space = spec, spec.space
        self.variants: list[Settings] = list(space.variants())
        self.index: dict[VariantKey, int] = {
            variant_key(settings): index for index, settings in enumerate(self.variants)
        }
        largest = [space.largest_micro_batch_of(settings) for settings in self.variants]
        self.largest_micro_batches: MicroBatches = np.array(largest, dtype=np.int64)
        self.whole = space.samples_per_rank or 2 * space.largest_micro_batch
        may_choose = space.global_batch is not None and space.only_micro_batch is None
        smallest = map(space.smallest_micro_batch_of, self.variants)
        self.has_choice: Mask = np.array([may_choose and size < self.whole for size in smallest])
        costs_s = [space.trial_cost_s(settings) for settings in self.variants]
        self.trial_costs_s: Array = np.array(costs_s, dtype=np.float64)

    @cached_property
    def memory(self) -> LineFamily:
        """Bytes over micro-batch, before any probe."""
        return LineFamily(
            self.variants,
            self._spec.space.dimensions,
            MEMORY_PRIOR,
            slope_hints=self._hints("bytes_per_sample"),
            fixed_hints=self._hints("fixed_bytes"),
            lines=self.predicted_lines,
        )

    @cached_property
    def time(self) -> LineFamily:
        """Seconds of one micro-batch over its size, before any probe."""
        times = self._by_index(self._spec.predicted_times)
        return LineFamily(
            self.variants,
            self._spec.space.dimensions,
            PREDICTED_TIME_PRIOR if times else TIME_PRIOR,
            slope_hints=self._hints("seconds_per_sample"),
            fixed_hints={},
            lines=times,
        )

    @cached_property
    def predicted_lines(self) -> Mapping[int, Line]:
        """Predicted memory lines by the place of the variant."""
        return self._by_index(self._spec.predicted_lines)

    @cached_property
    def without_recomputation(self) -> Indices:
        """(variants): the same variant without values that recompute; itself where it has none."""
        return self._without_recomputation_by(self._spec.space.dimensions)

    @cached_property
    def plainest_costly(self) -> Indices:
        """(variants): the same without recomputation by settings that go with costly ones alone."""
        return self._without_recomputation_by(self._costly)

    def _without_recomputation_by(self, names: Collection[str]) -> Indices:
        """Return (variants): the same without values of these settings that recompute."""
        dimensions, found = self._spec.space.dimensions, []
        for at, settings in enumerate(self.variants):
            saving = [n for n in names if dimensions[n].recomputes(settings[n])]
            without = {**settings, **{name: dimensions[name].values[0] for name in saving}}
            found.append(self.index.get(variant_key(without), at))
        return np.array(found, dtype=np.intp)

    def costly_beside(self, variant: int) -> Sequence[int]:
        """Return the costly variants that differ from one in costly values alone."""
        return self._costly_by_rest.get(self._rest(self.variants[variant]), ())

    @cached_property
    def _costly_by_rest(self) -> Mapping[VariantKey, Sequence[int]]:
        found: dict[VariantKey, list[int]] = {}
        for variant in np.flatnonzero(self.trial_costs_s > 0).tolist():
            found.setdefault(self._rest(self.variants[variant]), []).append(variant)
        return found

    def _rest(self, settings: Settings) -> VariantKey:
        """Return the settings that are not costly, nor allowed only beside costly ones."""
        return variant_key({n: v for n, v in settings.items() if n not in self._costly})

    @cached_property
    def _costly(self) -> set[str]:
        dimensions = self._spec.space.dimensions
        costly = {name for name, dimension in dimensions.items() if dimension.is_costly}
        return costly | {n for n, d in dimensions.items() if not costly.isdisjoint(d.when or {})}

    @cached_property
    def costly_names(self) -> Sequence[set[str]]:
        """(variants): the settings whose values make each costly."""
        of = self._spec.space.dimensions
        return [
            {n for n, v in each.items() if of[n].trial_cost_of(v) > 0} for each in self.variants
        ]

    def variant_of(self, settings: Settings) -> int | None:
        """Return the place of a variant, or None if the space does not have it."""
        return self.index.get(variant_key(settings))

    def _hints(self, field: str) -> Hints:
        return {
            (name, value): factor
            for name, dimension in self._spec.space.dimensions.items()
            for value, hint in dimension.hints.items()
            if (factor := getattr(hint, field)) is not None and factor > 0
        }

    def _by_index(self, lines: Mapping[VariantKey, Line]) -> Mapping[int, Line]:
        """Return predicted lines by variant index; empty without the plain variant's.

        Lines with a coefficient that has no logarithm are left out.
        """
        found = {
            index: line
            for key, index in self.index.items()
            if (line := lines.get(key)) is not None and min(line) > 0
        }
        return found if 0 in found else {}


class Beliefs:
    """What is believed of a space after some trials.

    Args:
        spec: the specification of the search.
        trials: of the search.
        pending: trials that are believed, not measured; see `autofit.planning.planner.believing`.
        known: what other beliefs of the specification use too.

    Attributes:
        measured: the trials that were run, less transient failures of the machine.
        probes: those and the pending.
    """

    def __init__(
        self,
        spec: SearchSpec,
        trials: Sequence[Trial],
        pending: Sequence[Trial] = (),
        known: Known | None = None,
    ) -> None:
        self.spec, self.pending, self.known = spec, tuple(pending), known or Known(spec)
        self.measured = [t for t in trusted(trials) if t.plan.variant in self.known.index]
        self.probes = [*self.measured, *self.pending]

    def updated(self, trials: Sequence[Trial]) -> Beliefs:
        """Return the beliefs after those trials: these if they hold the same probes."""
        fresh = Beliefs(self.spec, trials, known=self.known)
        return self if fresh.probes == self.probes else fresh

    @cached_property
    def of_search(self) -> Beliefs:
        """The beliefs without the turns of the final comparison."""
        searched = [t for t in self.measured if t.kind is not TrialKind.CONFIRMATION]
        return Beliefs(self.spec, searched, known=self.known)

    @property
    def variants(self) -> list[Settings]:
        """The settings of every variant."""
        return self.known.variants

    def index(self, plan: Plan) -> int:
        """Return the place of the plan's variant."""
        return self.known.index[plan.variant]

    # What may run

    @cached_property
    def exclusions(self) -> Exclusions:
        """Exclusions that follow from faults of earlier probes.

        What ran out of memory below a size that ran is an oddity of the allocator and bounds
        nothing, unless the final comparison shows it; and a step without accumulation holds no
        gradients beside activations. A pending probe shows no value to work.
        """
        known = [*self.measured, *(trial for trial in self.pending if not trial.ok)]
        ran: dict[tuple[VariantKey, bool], int] = {}
        for plan in (trial.plan for trial in known if trial.ok):
            of = plan.variant, plan.accumulation_steps > 1
            ran[of] = max(ran.get(of, 0), plan.micro_batch)
        kept = [
            trial
            for trial in known
            if trial.kind is TrialKind.CONFIRMATION
            or not trial.measurement.outcome.about_memory
            or trial.plan.micro_batch
            >= ran.get((trial.plan.variant, trial.plan.accumulation_steps > 1), 0)
        ]
        return exclusions_of(self.spec, kept)

    @cached_property
    def sizes(self) -> Sizes:
        """The micro-batches that may be run."""
        space, least = self.spec.space, self.exclusions.least
        return Sizes(
            space, [max(least(v), space.smallest_micro_batch_of(v)) for v in self.variants]
        )

    @cached_property
    def bound(self) -> MicroBatches:
        """(variants): the largest micro-batch that no probe has ruled out."""
        bounds = zip(
            self.known.largest_micro_batches.tolist(),
            map(self.exclusions.bound, self.variants),
            strict=True,
        )
        return np.array([own if bound is None else min(own, bound) for own, bound in bounds])

    @cached_property
    def accumulating(self) -> MicroBatches:
        """(variants): likewise of plans that accumulate."""
        whole, found = self.known.whole, self.exclusions.accumulating
        return np.minimum(self.bound, [found.get(key, whole) for key in self.known.index])

    def bound_at(self, variants: Places, sizes: MicroBatches | int) -> MicroBatches:
        """Return (plans): the bound of plans that accumulate, or do not, as these."""
        is_whole = np.asarray(sizes) >= self.known.whole
        return np.where(is_whole, self.bound[variants], self.accumulating[variants])

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
            and trial.plan.micro_batch
            <= self.bound_at(self.index(trial.plan), trial.plan.micro_batch)
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

    # Bytes

    @cached_property
    def held(self) -> HeldBytes:
        """The bytes that plans hold."""
        known = self.known
        return HeldBytes(
            self.spec, known.memory, known.has_choice, self.probes, self.measured, self.index
        )

    @property
    def has_predicted_memory(self) -> bool:
        """Whether memory lines were predicted, of all variants or of some to compose them from."""
        return bool(self.known.predicted_lines)

    @property
    def can_predict_memory(self) -> bool:
        """Whether any held bytes were measured or predicted."""
        measured = any(not reading.at_least for reading in self.held.readings)
        return measured or self.has_predicted_memory

    def oom_risk(self, plan: Plan) -> float:
        """Return the probability that a probe of the plan runs out of memory."""
        at = np.array([self.index(plan)]), np.array([plan.micro_batch])
        return 1 - float(self.held.chance(*at)[0])

    @cached_property
    def oom_probes(self) -> int:
        """Probes that ran out of memory, but for the baseline's, which nobody chose to risk."""
        return oom_probes_of([t for t in self.probes if t.kind is not TrialKind.BASELINE])

    def oom_cost(self, risk: Array) -> Array:
        """Return the cost of such risks of running out of memory: it grows with every OOM."""
        return OOM_COST * (1 + self.oom_probes / 2) * risk

    def largest_at(self, risk: float) -> MicroBatches:
        """Return (variants): the largest micro-batch with at most this risk.

        0 if there is none.
        """
        if risk not in self._largest_at:
            limits = np.minimum(self.held.limits(risk), self.accumulating)
            if self.held.gradient_bytes.any():
                every, whole = np.arange(len(limits)), self.known.whole
                fits = self.held.chance(every, np.full(len(limits), whole)) >= 1 - risk
                fits &= self.bound >= whole
                limits = np.where(fits, whole, np.minimum(limits, whole - 1))
            self._largest_at[risk] = self.sizes.down(limits)
        return self._largest_at[risk]

    @cached_property
    def _largest_at(self) -> dict[float, MicroBatches]:
        return {}

    @property
    def cautious(self) -> MicroBatches:
        """(variants): the largest micro-batch that most likely fits; 0 if there is none."""
        return self.largest_at(CAUTIOUS)

    @cached_property
    def optimistic(self) -> MicroBatches:
        """(variants): the largest micro-batch that may fit; 0 if there is none."""
        return np.maximum(self.cautious, self.largest_at(OPTIMISTIC))

    def reach_at(self, variants: Places, sizes: Array | MicroBatches) -> MicroBatches:
        """Return (plans): the largest micro-batch to try next, as far as these sizes need it.

        A step without accumulation is in reach too where gradients are known to take room in the
        others: once those ended, no smaller step leads there.
        """
        ends = self.accumulating < self.known.whole - 1
        may = (self.held.gradient_bytes > 0) & (self.bound >= self.known.whole)
        may &= ends | (self.known.whole <= self._most_in_reach)
        is_whole = np.asarray(sizes) >= self.known.whole
        return np.where(is_whole & may[variants], self.known.whole, self.reach[variants])

    @property
    def _most_in_reach(self) -> int:
        ran = [t.plan.micro_batch for t in self.measured if t.measurement.step_times_s]
        step = STEP_WITH_LINES if self.has_predicted_memory else STEP
        return step * max(ran, default=1)

    @cached_property
    def reach(self) -> MicroBatches:
        """(variants): the largest micro-batch to try next.

        No more than `STEP` times the largest of all that ran: a belief allows no larger step. After
        a failure it halves, in logarithms, what is left between the largest that fits and the
        smallest that failed, so that a limit is found within a few failures whatever its cause. A
        memory line that expected the failure is believed where it is sure of a larger size. A
        failure that no memory line expected, at a size that no variant has run, may await the other
        variants too.
        """
        reach: MicroBatches = np.minimum(self.accumulating, self._most_in_reach)
        limit, most = self.held.limits(0.5), int(self.largest.max(initial=1))
        for trial in self.probes:
            index, failed = self.index(trial.plan), trial.plan.micro_batch
            of, variant = self.exclusions, trial.plan.variant
            if failed - 1 not in (of.largest.get(variant), of.accumulating.get(variant)):
                continue
            fits = int(self.largest[index])
            middle = math.isqrt(max(1, fits) * failed)
            is_expected = trial.measurement.outcome.about_memory and limit[index] < ODD * failed
            if is_expected:
                middle = max(middle, min(int(self.cautious[index]), failed - 1))
            reach[index] = min(max(middle, self.sizes.at_least(fits + 1)), reach[index])
            if failed > most and not is_expected:
                shared = max(self.sizes.at_least(most + 1), math.isqrt(most * failed))
                reach = np.minimum(reach, shared)
        return reach

    # Speeds

    @cached_property
    def errors(self) -> Noise:
        """The errors of all probes."""
        return Noise(self.probes)

    @cached_property
    def _time_readings(self) -> list[Reading]:
        return [
            Reading(
                self.index(trial.plan),
                trial.plan.mean_micro_batch,
                log_seconds_of(trial),
                self.errors.of(trial),
            )
            for trial in self.probes
            if trial.measurement.step_times_s
        ]

    @cached_property
    def time(self) -> Lines:
        """Seconds of one micro-batch over its size; how far plans stray from lines is learned."""
        found = [Lines(self.known.time, self._time_readings, each) for each in TIME_SPREADS]
        return max(found, key=lambda lines: lines.evidence - math.log(lines.spread) / 2)

    @cached_property
    def typical_noise(self) -> float:
        """The median of all probes' noise; 0 if nothing was timed."""
        return statistics.median([reading.error for reading in self._time_readings] or [0.0])

    def speeds(self, variants: Indices, sizes: MicroBatches) -> tuple[Array, LogValues]:
        """Return (plans): the expected log of samples/s, its start included, and about its time."""
        space, size = self.spec.space, np.maximum(np.asarray(sizes, dtype=np.float64), 1.0)
        share = space.samples_per_rank or size  # of the rank with most, whose time counts
        steps = 1 if space.samples_per_rank is None else np.ceil(share / size)
        times = self.time.at(variants, np.broadcast_to(share / steps, size.shape))
        log_samples = np.log((space.global_batch or size * space.ranks) / steps)
        return self.over_training(log_samples - times.mean, self.start_up_s[variants]), times

    def mean_log_speed(self, plan: Plan) -> float:
        """Return the expected log of the plan's samples per second."""
        found = self._fitting_speeds.get(plan)
        return float(self._speed(plan)[0][0]) if found is None else found

    def ahead(self, plan: Plan, other: Plan) -> tuple[float, float]:
        """Return how far the log speed of a plan is ahead of another's: mean and deviation."""
        (mean, times), (of_other, other_times) = self._speed(plan), self._speed(other)
        variance = times.variance + other_times.variance - 2 * times.covariance(other_times)
        return float(mean[0] - of_other[0]), math.sqrt(max(float(variance[0]), 0.0))

    def deviation(self, plan: Plan) -> float:
        """Return the standard deviation of the log of the plan's speed."""
        return math.sqrt(float(self._speed(plan)[1].variance[0]))

    def _speed(self, plan: Plan) -> tuple[Array, LogValues]:
        return self.speeds(np.array([self.index(plan)]), np.array([plan.micro_batch]))

    @cached_property
    def _fitting_speeds(self) -> Mapping[Plan, float]:
        plans = list(dict.fromkeys(trial.plan for trial in self.fitting))
        variants = np.array([self.index(plan) for plan in plans], dtype=np.intp)
        mean, _ = self.speeds(variants, np.array([plan.micro_batch for plan in plans]))
        return dict(zip(plans, mean.tolist(), strict=True))

    @cached_property
    def speeds_by_size(self) -> Mapping[int, Mapping[int, float]]:
        """Variant -> micro-batch -> log speed of what fits."""
        found: dict[int, dict[int, float]] = {}
        for plan, log_speed in self._fitting_speeds.items():
            found.setdefault(self.index(plan), {})[plan.micro_batch] = log_speed
        return found

    @cached_property
    def incumbent(self) -> Trial | None:
        """The trial whose plan, among those that ran and fit, is expected to be fastest.

        Expected by the lines and all measurements: while a search goes on, one probe tells less.
        """
        return max(self.fitting, key=lambda t: self.mean_log_speed(t.plan), default=None)

    @cached_property
    def trial_costs_s(self) -> Array:
        """(variants): the extra seconds of a probe of each.

        As strategies expect, times the factor by which cold starts of the same setting differed
        from that: compilations of one model on one machine have it in common.
        """
        costs_s, names = self.known.trial_costs_s, self.known.costly_names
        took_s: dict[int, float] = {}
        for trial in self.measured:
            index, measured = self.index(trial.plan), trial.measurement
            if measured.start_is_warm is False and measured.start_up_s is not None:
                took_s[index] = max(measured.start_up_s, took_s.get(index, 0.0))
        expected_s = sum(costs_s[each] for each in took_s)
        if not expected_s:
            return costs_s
        seen = set[str]().union(*(names[each] for each in took_s))
        is_alike = [not seen.isdisjoint(each) for each in names]
        return np.where(is_alike, costs_s * (sum(took_s.values()) / expected_s), costs_s)

    @cached_property
    def start_up_s(self) -> Array:
        """(variants): seconds before the first step of a training with costly settings, else 0.

        What a training takes that finds its compiled code in torch's cache, where that was
        measured, as in a second worker; else the most that was.
        """
        start_up_s = self.trial_costs_s.copy()
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
        if not samples or not np.any(start_up_s):
            return log_speed
        slower: Array = np.log1p(start_up_s * np.exp(log_speed) / samples)
        return log_speed - slower
