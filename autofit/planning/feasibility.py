"""The micro-batches of a space, and the exclusions that follow from faults of earlier probes.

A fault is blamed on the settings that never worked anywhere: if bfloat16 alone is new in a failing
variant, every variant with bfloat16 is excluded; if several settings are new, the variants that
have all of them are. Where a size is refused, new settings are to blame once they were refused at
two sizes, of which the smaller is no larger than one that ran. A fault of a variant that worked
before bounds its micro-batch; where faults that are not about memory bound several variants, the
bound holds for all that have what these share. No fault moves a memory line.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autofit.measurement import Measurement, Outcome, Trial, TrialKind, probes_of
from autofit.plan import Scalar, Settings, VariantKey, variant_key
from autofit.planning.constants import MAX_TRANSIENT
from autofit.planning.search_spec import SearchSpec
from autofit.space import Space

MicroBatches: TypeAlias = NDArray[np.int64]

_ABOUT_SIZE = (Outcome.SIZE_LIMIT, Outcome.HOST_OOM)
_OF_THE_TRAINING = (Outcome.UNSUPPORTED, Outcome.NONFINITE, Outcome.LEAK)
_TRANSIENT = (Outcome.CRASHED, Outcome.POISONED, Outcome.TIMEOUT)


class Sizes:
    """The micro-batches that each variant of a space may have.

    With a global batch of G samples they are ceil(G / k), or the divisors of G where splits must be
    even; without one, every whole number. If the accumulation may not change, there is only one.

    Args:
        space: the space.
        least: per variant, the smallest micro-batch that is not known to fail.

    Attributes:
        smallest: per variant, the smallest micro-batch of the space that is no smaller than that.
    """

    def __init__(self, space: Space, least: Sequence[int]) -> None:
        self._whole = space.samples_per_rank
        self._largest = space.largest_micro_batch
        self._fixed = space.only_micro_batch
        self._divisors = _divisors(space.samples_per_rank) if space.even_split else None
        self.smallest = np.array([self.at_least(size) for size in least])

    def down(self, wanted: NDArray[np.float64]) -> MicroBatches:
        """Return the largest micro-batches up to those wanted; 0 if there is none.

        Args:
            wanted: (variants) or (draws, variants).
        """
        size = np.floor(np.clip(wanted, 0, self._largest)).astype(np.int64)
        if self._fixed is not None:
            return np.where(size >= self._fixed, self._fixed, 0)
        if self._divisors is not None:
            at = np.searchsorted(self._divisors, size, side="right")
            size = np.where(at > 0, self._divisors[at - 1], 0)
        elif self._whole is not None:
            steps = -(-self._whole // np.maximum(size, 1))
            size = -(-self._whole // steps) * (size >= 1)
        return np.where(size >= self.smallest, size, 0)

    def handy(self, wanted: NDArray[np.float64]) -> MicroBatches:
        """Return `down` rounded to about two digits: 768 is easier to read than 771.

        Micro-batches that a global batch determines are not rounded.
        """
        size = self.down(wanted)
        if self._whole is not None or self._fixed is not None:
            return size
        grain = 2 ** np.maximum(0, np.floor(np.log2(np.maximum(size, 1))).astype(np.int64) - 6)
        handy: MicroBatches = np.maximum(size // grain * grain, np.minimum(size, self.smallest))
        return handy

    def at_least(self, size: int) -> int:
        """Return the smallest micro-batch that is no smaller, or the largest of all."""
        if self._fixed is not None:
            return self._fixed
        if self._divisors is not None:
            at = min(int(np.searchsorted(self._divisors, size)), len(self._divisors) - 1)
            return int(self._divisors[at])
        if self._whole is None or size <= 1:
            return size
        steps = max(1, -(-self._whole // (size - 1)) - 1)
        return -(-self._whole // steps)


def _divisors(global_batch: int | None) -> MicroBatches | None:
    if global_batch is None:
        return None
    return np.array([size for size in range(1, global_batch + 1) if global_batch % size == 0])


@dataclass(frozen=True)
class Exclusions:
    """Variants and micro-batches that may no longer be run.

    Attributes:
        blamed: settings that fail together -> the reason.
        largest: variant -> the largest micro-batch that is not known to be refused.
        accumulating: variant -> likewise of plans that accumulate, which hold gradients beside
            activations: what ran out of memory there may fit in one micro-batch.
        shared: (settings, size): what several variants share that were refused at this micro-batch
            or less, not for memory; it is the largest for every variant with these settings.
        smallest: the smallest micro-batch that is not known to fail in the plain variant; it holds
            for every variant.
        smallest_of: variant -> likewise, if only that variant is known to fail.
    """

    blamed: Mapping[VariantKey, str]
    largest: Mapping[VariantKey, int]
    accumulating: Mapping[VariantKey, int]
    shared: Sequence[tuple[VariantKey, int]]
    smallest: int
    smallest_of: Mapping[VariantKey, int]

    def why(self, settings: Settings) -> str | None:
        """Return why a variant is excluded; None if it is not."""
        if not self.blamed:  # spaces may have thousands of variants
            return None
        have = set(settings.items())
        return next((why for blamed, why in self.blamed.items() if have.issuperset(blamed)), None)

    def bound(self, settings: Settings) -> int | None:
        """Return a variant's largest micro-batch that is not known to be refused; None: any."""
        if not self.shared and not self.largest:
            return None
        have = set(settings.items())
        bounds = [size for common, size in self.shared if have.issuperset(common)]
        own = self.largest.get(variant_key(settings))
        return min(bounds if own is None else [own, *bounds], default=None)

    def least(self, settings: Settings) -> int:
        """Return a variant's smallest micro-batch that is not known to fail."""
        if not self.smallest_of:
            return max(self.smallest, 1)
        return max(self.smallest, self.smallest_of.get(variant_key(settings), 1))


def trusted(trials: Sequence[Trial]) -> list[Trial]:
    """Return the probes among these trials, less those of times when the machine was at fault.

    It was where transient failures in a row did not end with the plan that shows whether it is (see
    `MAX_TRANSIENT`), or where there was no such plan yet. Those say nothing of their plans, in
    this search or one that is resumed.
    """
    kept: list[Trial] = []
    failures: list[Trial] = []
    for trial in probes_of(trials):
        if trial.measurement.outcome.may_be_transient:
            failures.append(trial)
            continue
        kept += [*_failures_of_plans(failures, kept), trial]
        failures = []
    return [*kept, *_failures_of_plans(failures, kept)]


def _failures_of_plans(failures: Sequence[Trial], before: Sequence[Trial]) -> Sequence[Trial]:
    most = MAX_TRANSIENT if any(trial.ok for trial in before) else MAX_TRANSIENT - 1
    return failures if len(failures) <= most else ()


def exclusions_of(spec: SearchSpec, trials: Sequence[Trial]) -> Exclusions:
    """Return the exclusions that follow from these trials."""
    blamed: dict[VariantKey, str] = {}
    largest: dict[VariantKey, int] = {}
    accumulating: dict[VariantKey, int] = {}
    largest_apart_from_memory: dict[VariantKey, int] = {}
    smallest, smallest_of = 1, dict[VariantKey, int]()
    refused_small: dict[int, list[VariantKey]] = {}
    plain = spec.space.baseline
    ran = [t.plan for t in trials if t.measurement.outcome.ran and t.kind is not TrialKind.VETOED]
    works: set[tuple[str, Scalar]] = {pair for plan in ran for pair in plan.variant}
    works |= set(plain.variant)
    ran_variants = {plan.variant for plan in ran}
    for trial in trials:
        outcome, plan = trial.measurement.outcome, trial.plan
        # Memory ran out for another process, at a size that fits by itself
        is_disproved = trial.measurement.contended and any(
            other.ok
            and other.plan.variant == plan.variant
            and other.plan.micro_batch >= plan.micro_batch
            and (other.plan.accumulation_steps > 1) == (plan.accumulation_steps > 1)
            for other in trials
        )
        if trial.kind is TrialKind.VETOED or outcome is Outcome.OK or is_disproved:
            continue
        worked = plan.variant in ran_variants
        larger = plan.micro_batch > plain.micro_batch
        of_size = outcome in _TRANSIENT or (larger and outcome in _OF_THE_TRAINING)
        if outcome.about_memory or outcome in _ABOUT_SIZE or (worked and of_size):
            below = plan.micro_batch - 1
            holds_gradients = outcome.about_memory and plan.accumulation_steps > 1
            bounds = accumulating if holds_gradients else largest
            bounds[plan.variant] = min(below, bounds.get(plan.variant, below))
            if not outcome.about_memory:
                apart = largest_apart_from_memory
                apart[plan.variant] = min(below, apart.get(plan.variant, below))
        elif plan.variant == plain.variant and plan.micro_batch < plain.micro_batch:
            smallest = max(smallest, plan.micro_batch + 1)
        elif outcome is Outcome.UNSUPPORTED and plan.micro_batch < plain.micro_batch:
            refused_small.setdefault(plan.micro_batch, []).append(plan.variant)
        else:
            new = tuple(pair for pair in plan.variant if pair not in works)
            blamed[new or plan.variant] = _words(trial.measurement)
    for size, variants in refused_small.items():
        if set[tuple[str, Scalar]].intersection(*(set(v) - set(plain.variant) for v in variants)):
            # The baseline's size will show whether the size or the settings are to blame.
            smallest_of |= dict.fromkeys(variants, plain.micro_batch)
        else:  # no setting that all of them have: the size is
            smallest = max(smallest, size + 1)
    most = max((plan.micro_batch for plan in ran), default=0)
    blamed |= dict(_refused_at_two_sizes(trials, works, most))
    shared = _shared_bounds(largest_apart_from_memory, trials)
    return Exclusions(blamed, largest, accumulating, shared, smallest, smallest_of)


def _words(measured: Measurement) -> str:
    return measured.outcome.value + (f": {measured.detail}" if measured.detail else "")


def _refused_at_two_sizes(
    trials: Sequence[Trial], works: Container[tuple[str, Scalar]], most: int
) -> Iterator[tuple[VariantKey, str]]:
    """Yield settings that never worked, refused at two sizes, the smaller up to `most`; and why."""
    sizes: dict[VariantKey, set[int]] = {}
    for trial in probes_of(trials):
        if trial.measurement.outcome in _ABOUT_SIZE:
            new = tuple(pair for pair in trial.plan.variant if pair not in works)
            refused = sizes.setdefault(new, set())
            refused.add(trial.plan.micro_batch)
            if new and len(refused) > 1 and min(refused) <= most:
                yield new, _words(trial.measurement)


def _shared_bounds(
    largest: Mapping[VariantKey, int], trials: Sequence[Trial]
) -> list[tuple[VariantKey, int]]:
    """Return bounds for what refused variants share, less those that a larger size disproves."""
    bounds: list[tuple[VariantKey, int]] = []
    common: set[tuple[str, Scalar]] | None = None
    for variant, size in sorted(largest.items(), key=lambda item: item[1]):
        if common is None:
            common = set(variant)
            continue
        common &= set(variant)
        ran = (t.plan for t in trials if t.ok and common.issubset(t.plan.variant))
        if not any(plan.micro_batch > size for plan in ran):
            bounds.append((tuple(sorted(common)), size))
    return bounds
