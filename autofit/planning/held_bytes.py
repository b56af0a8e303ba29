"""The bytes that plans hold: what probes told, the lines through that, and which plans fit.

What is held grows in segments of the allocator, what is allocated does not: where a segment is a
large part of what is held, a reading is mostly what probes that allocate as much usually hold.
Bytes that are known to be fixed bound their line from below at no samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.planning.constants import (
    MEMORY_ERROR,
    MEMORY_ERRORS,
    MEMORY_SPREAD,
    MIN_GROWING,
    TINY,
)
from autofit.planning.feasibility import MicroBatches
from autofit.planning.lines import Array, Indices, LineFamily, Lines, Reading
from autofit.planning.search_spec import SearchSpec

NO_SAMPLES = 1e-6
"""A micro-batch of hardly a sample: its bytes are those that are fixed."""


class HeldBytes:
    """What is believed of the bytes that plans hold.

    Args:
        spec: of the search.
        family: what is believed before any probe.
        has_choice: (variants), whether some plans of each accumulate and one does not.
        probes: measured and believed ones.
        measured: the measured ones.
        index: the place of a plan's variant.
    """

    def __init__(
        self,
        spec: SearchSpec,
        family: LineFamily,
        has_choice: NDArray[np.bool_],
        probes: Sequence[Trial],
        measured: Sequence[Trial],
        index: Callable[[Plan], int],
    ) -> None:
        self._spec, self._family, self._has_choice = spec, family, has_choice
        self._probes, self._measured, self._index = probes, measured, index

    @cached_property
    def lines(self) -> Lines:
        """The lines through what was read."""
        return self._lines(self._scatter)

    def lines_without(self, variant: int) -> Lines:
        """Return the lines as they would be had nothing of a variant run out of memory."""
        kept = [r for r in self.readings if not (r.variant == variant and r.at_least)]
        return self._lines(MEMORY_ERROR, kept)

    def _lines(self, scatter: float, readings: Sequence[Reading] | None = None) -> Lines:
        readings = self.readings if readings is None else readings
        scattered = [r._replace(error=max(r.error, self._growing(scatter, r))) for r in readings]
        return Lines(self._family, scattered, MEMORY_SPREAD)

    def _growing(self, scatter: float, reading: Reading) -> float:
        return scatter * self._growing_share(math.exp(reading.log))

    @cached_property
    def _scatter(self) -> float:
        """Standard deviation of log bytes around the lines, as far as the readings tell."""
        if all(reading.at_least for reading in self.readings):
            return MEMORY_ERROR
        return max(MEMORY_ERRORS, key=lambda scatter: self._lines(scatter).evidence)

    def error(self, held_bytes: float) -> float:
        """Return the standard deviation of the log of what a probe holds, around its line.

        It is the scatter of what is not known to be fixed, or that of rounding up to segments where
        that is more.
        """
        return self._error(self._scatter, held_bytes)

    def _error(self, scatter: float, held_bytes: float) -> float:
        growing = scatter * self._growing_share(held_bytes)
        return max(growing, math.sqrt(self._rounding(held_bytes)))

    def _growing_share(self, held_bytes: float) -> float:
        fixed = min(self._fixed_bytes.values(), default=0)
        return max(MIN_GROWING, 1 - fixed / held_bytes)

    def _rounding(self, held_bytes: float) -> float:
        """Return the variance of the log of held bytes that rounding up to whole segments causes.

        Rounding is uniform within a segment, or within all that is held if that is less.
        """
        return (min(self._spec.segment_bytes, held_bytes) / held_bytes) ** 2 / 12

    def limits(self, risk: float) -> Array:
        """Return (variants): the micro-batch at which a probe runs out of memory with this risk."""
        deviations = -statistics.NormalDist().inv_cdf(risk)
        fixed, slope = np.exp(self.lines.coefficients)
        every, budget = np.arange(len(fixed)), float(self._spec.vram_budget_bytes)
        error, allowed = self.error(budget), np.full(len(fixed), budget)
        for _ in range(3):  # the deviation depends on the size
            sizes = np.clip((allowed - fixed) / slope, 1.0, 1e9)
            deviation = np.sqrt(self.lines.at(every, sizes).variance + error**2)
            allowed = budget * np.exp(-deviations * deviation)
        limits: Array = (allowed - fixed) / slope
        return limits

    def chance(self, variants: Indices, sizes: Array | MicroBatches) -> Array:
        """Return (plans): the probability that a probe of each one fits."""
        budget = self._spec.vram_budget_bytes
        values = self.lines.at(variants, np.asarray(sizes, dtype=np.float64))
        deviation = np.sqrt(values.variance + self.error(budget) ** 2)
        allowed = np.log(budget + self._not_held(variants, sizes))
        chance: Array = normal_cdf((allowed - values.mean) / deviation)
        return chance

    def quantile(self, plan: Plan, share: float = 0.5) -> float:
        """Return the bytes under which the plan stays with this probability, by its line."""
        at = np.array([self._index(plan)]), np.array([float(plan.micro_batch)])
        values = self.lines.at(*at)
        deviations = statistics.NormalDist().inv_cdf(share)
        held = math.exp(values.mean[0] + deviations * math.sqrt(values.variance[0]))
        least = self._fixed_bytes.get(self._index(plan), 0)
        return max(held - float(self._not_held(*at)[0]), min(held, least))

    @cached_property
    def gradient_bytes(self) -> Array:
        """(variants): bytes of gradients, which are held beside activations in an accumulation.

        In a step of one micro-batch they are made while activations go, so that it holds so much
        less than a line through plans that accumulate. 0 where that is unknown, or there is no such
        choice. A variant that did not run has the fewest of those that did.
        """
        known: dict[int, int] = {}
        for trial in self._measured:
            index, gradients = self._index(trial.plan), trial.measurement.gradient_bytes
            if gradients is not None and self._has_choice[index]:
                known[index] = gradients
        found = np.where(self._has_choice, float(min(known.values(), default=0)), 0.0)
        found[list(known)] = list(known.values())
        return found

    def _not_held(self, variants: Indices, sizes: Array | MicroBatches) -> Array:
        """Return (plans): bytes of their lines that plans without accumulation do not hold."""
        whole = self._spec.space.samples_per_rank or math.inf
        return np.where(np.asarray(sizes) >= whole, self.gradient_bytes[variants], 0.0)

    @cached_property
    def readings(self) -> list[Reading]:
        """What probes told of bytes, and what is known to be fixed."""
        refuted = {
            trial.plan
            for trial in self._probes
            if trial.kind is TrialKind.CONFIRMATION and trial.measurement.outcome.about_memory
        }
        read = [
            self._reading(trial)
            for trial in self._probes
            if not (trial.plan in refuted and trial.measurement.outcome is Outcome.OK)
        ]
        fixed = [
            Reading(variant, NO_SAMPLES, math.log(known), MEMORY_ERROR, at_least=True)
            for variant, known in self._fixed_bytes.items()
        ]
        return [*filter(None, read), *fixed]

    def _reading(self, trial: Trial) -> Reading | None:
        measured, held = trial.measurement, trial.measurement.held_bytes
        index, size = self._index(trial.plan), float(trial.plan.micro_batch)
        if measured.outcome in (Outcome.OK, Outcome.OVER_BUDGET) and held:
            even, error = self._even(measured, held)
            even += float(self._not_held(np.array([index]), np.array([size]))[0])
            return Reading(index, size, math.log(even), error)
        if not measured.outcome.about_memory:
            return None
        # Of what ran out while other processes used part of the budget, it needs what it held. No
        # gradients are added: some may be there while most activations are.
        needed = held if measured.contended else self._spec.vram_budget_bytes
        if not needed:
            return None
        error = self._error(MEMORY_ERROR, needed)
        return Reading(index, size, math.log(needed), error, at_least=True)

    @cached_property
    def _fixed_bytes(self) -> Mapping[int, int]:
        """The bytes that are known to be fixed, by variant."""
        fixed: dict[int, int] = {}
        for trial in self._measured:
            if known := trial.measurement.least_held_bytes:
                index = self._index(trial.plan)
                fixed[index] = min(known, fixed.get(index, known))
        return fixed

    def _even(self, measured: Measurement, held: float) -> tuple[float, float]:
        """Return bytes held that grow evenly with the micro-batch, and the error of their log."""
        expected = self._expected(measured)
        if not expected:
            return held, math.sqrt(self._rounding(held))
        usual = expected * self._usual_factor + (measured.non_torch_bytes or 0)
        share, error = self.weigh(held)
        return held ** (1 - share) * usual**share, error

    def weigh(self, held_bytes: float) -> tuple[float, float]:
        """Return the weight of what is usual beside what a probe held, and the error of their mean.

        What is usual is a mean over probes, this one among them: they share part of the rounding.
        """
        rounding = self._rounding(held_bytes)
        shared = rounding / max(1, len(self._held_over_expected))
        own = MEMORY_ERROR * self._growing_share(held_bytes)
        share = (rounding - shared) / (rounding - shared + own**2)
        return share, math.sqrt((1 - share) * rounding + share * shared)

    @cached_property
    def _held_over_expected(self) -> Sequence[float]:
        """Of each probe that ran, the bytes reserved over those expected of what it allocated."""
        ran = [
            trial.measurement
            for trial in self._probes
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
        return allocated + min(self._spec.segment_bytes, reserved) / 2


def normal_cdf(deviations: Array) -> Array:
    """Return the probability that a standard normal is below each."""
    flat = [0.5 * math.erfc(-each / math.sqrt(2)) for each in deviations.ravel().tolist()]
    return np.array(flat).reshape(deviations.shape)


def expected_gain(mean: Array, deviation: Array) -> Array:
    """Return E[max(0, x)] of normal x: what there is to gain by choosing x or nothing.

    Where `deviation` is that of what x will be expected to be, it is the knowledge gradient
    (Frazier, Powell and Dayanik, SIAM J. Control Optim. 47, 2008).
    """
    deviation = np.maximum(deviation, TINY)
    z = np.clip(mean / deviation, -30, 30)  # beyond, a normal's tail is nothing
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    gain: Array = np.where(mean / deviation > z, mean, deviation * (density + z * normal_cdf(z)))
    return gain
