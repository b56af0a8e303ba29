"""What the probes so far say of every variant: which micro-batches fit, and how fast they are.

It follows from the specification and the probes alone, as samples ("worlds") of all memory lines
and time lines that agree with the measurements (`autofit.planning.curves`). Derived values are
computed once and cached, so keep the posterior for several decisions after the same probes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from autofit.measurement import Outcome, Role, Trial, probes_of
from autofit.plan import Plan, Scalar, Settings, VariantKey, variant_key
from autofit.planning.curve_fit import Array
from autofit.planning.curves import LineFamily, Point, Spread, Worlds
from autofit.planning.feasibility import Counts, Exclusions, Sizes, exclusions_of
from autofit.planning.search_spec import MemoryLine, SearchSpec

WORLDS = 160
MEMORY_ERROR = 0.02
"""Standard deviation of the logarithm of what a probe holds around its line."""

_STRAY = 0.01
"""Standard deviation of the logarithm of a plan's step time around its line: kernels suit one
micro-batch better than the next, however well each repeats."""

_LEAST_SCATTER = 0.002  # no clock says more of the next probe
_ALIKE = 1.5  # steps whose lengths differ by less scatter alike
_MEMORY_SPREAD = Spread(trend=0.7, bend=0.4)
_TIME_SPREAD = Spread(trend=0.3, bend=0.15)


class Posterior:
    """What is known of a space after some trials.

    Attributes:
        spec: the specification of the search.
        probes: the trials that were run.
        variants: the settings of every variant; arrays have one column for each.
    """

    def __init__(self, spec: SearchSpec, trials: Sequence[Trial]) -> None:
        self.spec = spec
        self.variants: list[Settings] = list(spec.space.variants())
        self._index: dict[VariantKey, int] = {
            variant_key(settings): index for index, settings in enumerate(self.variants)
        }
        self.probes = [t for t in probes_of(trials) if t.plan.variant in self._index]
        self._known_speeds: dict[Plan, Array] = {}

    def updated(self, trials: Sequence[Trial]) -> Posterior:
        """The posterior after those trials: these, where they hold the same probes."""
        fresh = Posterior(self.spec, trials)
        return self if fresh.probes == self.probes else fresh

    def index(self, plan: Plan) -> int:
        """The column of the plan's variant."""
        return self._index[plan.variant]

    @cached_property
    def exclusions(self) -> Exclusions:
        """What may not be run whatever it holds."""
        return exclusions_of(self.spec, self.probes)

    @cached_property
    def sizes(self) -> Sizes:
        """The micro-batches that may be run."""
        return Sizes(self.spec.space, [self.exclusions.least(v) for v in self.variants])

    @cached_property
    def bound(self) -> Counts:
        """Per variant, the largest micro-batch that is not ruled out."""
        bounds = [self.exclusions.bound(settings) for settings in self.variants]
        largest = self.spec.space.largest_micro_batch
        return np.array([largest if bound is None else bound for bound in bounds])

    @cached_property
    def usable(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Per variant, whether it is not set aside."""
        return np.array([self.exclusions.why(settings) is None for settings in self.variants])

    @cached_property
    def fitting(self) -> list[Trial]:
        """The probes that ran within the budget, and that no later probe speaks against."""
        return [
            trial
            for trial in self.probes
            if trial.ok
            and trial.plan.micro_batch <= self.bound[self.index(trial.plan)]
            and self.exclusions.why(trial.plan.settings) is None
        ]

    @cached_property
    def memory(self) -> Worlds:
        """Bytes over micro-batch."""
        lines, hints = self._predicted_lines(), self._hints("bytes_per_sample")
        dimensions = self.spec.space.dimensions
        family = LineFamily(self.variants, dimensions, _MEMORY_SPREAD, hints, lines)
        return family.worlds(self._memory_points(), WORLDS, self.seed)

    @cached_property
    def time(self) -> Worlds:
        """Seconds of one micro-batch over its size."""
        hints = self._hints("seconds_per_sample")
        family = LineFamily(self.variants, self.spec.space.dimensions, _TIME_SPREAD, hints, {})
        return family.worlds(self._time_points(), WORLDS, self.seed + 1)

    @property
    def seed(self) -> int:
        """Of the random choices after these probes."""
        return 1000 * self.spec.seed + len(self.probes)

    def speeds(self, micro_batches: Counts) -> Array:
        """(worlds, variants): logarithms of samples per second at those micro-batches.

        Args:
            micro_batches: one per variant, or one per world and variant; -inf where it is 0.
        """
        size = np.maximum(micro_batches, 1)
        whole = self.spec.space.global_batch
        steps = 1 if whole is None else np.ceil(whole / size)
        samples = size if whole is None else whole
        seconds = steps * np.exp(self.time.intercept) + np.exp(self.time.slope) * samples
        return np.where(micro_batches >= 1, np.log(samples / seconds), -np.inf)

    def speed(self, plan: Plan) -> Array:
        """(worlds,): the logarithm of the plan's samples per second."""
        if plan not in self._known_speeds:
            self._known_speeds[plan] = self._speed(plan)
        return self._known_speeds[plan]

    def _speed(self, plan: Plan) -> Array:
        index, samples = self.index(plan), plan.samples_per_step
        fixed = plan.accumulation_steps * np.exp(self.time.intercept[:, index])
        seconds = fixed + np.exp(self.time.slope[:, index]) * samples
        speed: Array = np.log(samples / seconds) - self._stray(plan)
        return speed

    def _stray(self, plan: Plan) -> Array:
        """(worlds,): by how much the plan's step time is off its line, as its probes have it.

        The posterior of a normal mean: readings are off by their scatter, the mean by `_STRAY`.
        """
        probes = [t for t in self.probes if t.plan == plan and t.measurement.step_times_s]
        weights = np.array([self.scatter(trial) ** -2 for trial in probes])
        index, x = self.index(plan), plan.samples_per_step / plan.accumulation_steps
        line = np.logaddexp(self.time.intercept[:, index], self.time.slope[:, index] + math.log(x))
        off = np.array([math.log(_seconds(trial)) for trial in probes]) - line[:, None]
        precision = weights.sum() + _STRAY**-2
        random = np.random.default_rng((self.seed, index, plan.micro_batch))
        stray: Array = off @ weights / precision
        return stray + random.standard_normal(len(line)) / math.sqrt(precision)

    def held(self, plan: Plan) -> Array:
        """(worlds,): the bytes that the plan's line has it hold."""
        index = self.index(plan)
        slope = np.exp(self.memory.slope[:, index])
        held: Array = np.exp(self.memory.intercept[:, index]) + slope * plan.micro_batch
        return held

    @property
    def can_predict_memory(self) -> bool:
        """Whether anything was measured or predicted of what plans hold."""
        measured = any(not point.at_least for point in self._memory_points())
        return measured or bool(self._predicted_lines())

    @cached_property
    def has_prior_memory(self) -> bool:
        """Whether something was said beforehand of what every variant holds, by line or by hint."""
        hinted = self._hints("bytes_per_sample")
        values = {
            (name, value)
            for name, dimension in self.spec.space.dimensions.items()
            for value in dimension.values[1:]
        }
        by_hints = bool(values) and values <= hinted.keys()
        return by_hints or len(self._predicted_lines()) == len(self.variants)

    @cached_property
    def room(self) -> Array:
        """(worlds, variants): the micro-batch that a probe just has room for, noise included."""
        noise = np.random.default_rng(self.seed + 2).standard_normal((WORLDS, 1))
        return self.memory.reach(self.spec.vram_budget_bytes * np.exp(MEMORY_ERROR * noise))

    def risk(self, plan: Plan) -> float:
        """The probability that a probe of the plan runs out of memory."""
        return float((self.room[:, self.index(plan)] < plan.micro_batch).mean())

    def scatter(self, trial: Trial) -> float:
        """Standard deviation of the logarithm of a probe's step time, from probe to probe.

        A probe repeats no better than its steps do. Few steps say little of that, so probes with
        steps about as long are asked too: for their median, since one probe that another process
        disturbed says nothing of the others.
        """
        alike = [
            _scatter_of_steps(other)
            for other in self.probes
            if other.measurement.step_times_s
            and 1 / _ALIKE < _seconds(other) / _seconds(trial) < _ALIKE
        ]
        return max(_LEAST_SCATTER, _scatter_of_steps(trial), statistics.median(alike))

    def _hints(self, field: str) -> dict[tuple[str, Scalar], float]:
        return {
            (name, value): factor
            for name, dimension in self.spec.space.dimensions.items()
            for value, hint in dimension.hints.items()
            if (factor := getattr(hint, field)) is not None and factor > 0
        }

    def _predicted_lines(self) -> Mapping[int, MemoryLine]:
        """By variant, those that a logarithm can be taken of; none without the plain one's."""
        lines = [self.spec.predicted_line(settings) for settings in self.variants]
        found = {i: line for i, line in enumerate(lines) if line is not None and min(line) > 0}
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
            elif outcome.about_memory and held:  # others took the room that was left
                points.append(Point(variant, x, float(held), MEMORY_ERROR, at_least=True))
        return points

    def _time_points(self) -> list[Point]:
        return [
            Point(
                self.index(trial.plan),
                trial.plan.samples_per_step / trial.plan.accumulation_steps,
                _seconds(trial),
                math.hypot(self.scatter(trial), _STRAY),
            )
            for trial in self.probes
            if trial.measurement.step_times_s
        ]


def _scatter_of_steps(trial: Trial) -> float:
    """Standard deviation of the logarithm of one probe's step times around their median."""
    times = trial.measurement.step_times_s
    middle = statistics.median(times)
    squares = sum(math.log(seconds / middle) ** 2 for seconds in times)
    return math.sqrt(squares / max(1, len(times) - 1))


def _seconds(trial: Trial) -> float:
    """Of one micro-batch."""
    step_time_s = trial.measurement.step_time_s
    assert step_time_s is not None
    return step_time_s / trial.plan.accumulation_steps
