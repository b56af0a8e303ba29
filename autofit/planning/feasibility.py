"""What earlier probes rule out beside memory and speed: variants that fail, sizes kernels refuse.

A fault is blamed on the settings that never worked anywhere: where bfloat16 alone is new in a
failing variant, every variant with bfloat16 is set aside; where several settings are new, those
variants that have all of them. A fault of a variant that worked before bounds its micro-batch. No
fault moves a memory line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.measurement import Outcome, Role, Trial
from autofit.plan import Scalar, Settings, VariantKey, variant_key
from autofit.planning.curves import Array
from autofit.planning.search_spec import SearchSpec
from autofit.space import Space

_ABOUT_SIZE = (Outcome.SIZE_LIMIT, Outcome.HOST_OOM)
_OF_THE_TRAINING = (Outcome.UNSUPPORTED, Outcome.NONFINITE, Outcome.LEAK)
_ACCIDENTS = (Outcome.CRASHED, Outcome.POISONED, Outcome.TIMEOUT)


@dataclass(frozen=True)
class Exclusions:
    """What may not be run any more.

    Attributes:
        blamed: settings that fail together -> why.
        largest: variant -> the largest micro-batch that is not known to be refused.
        smallest: the smallest micro-batch that is not known to fail in the plain variant, nor so
            in any other.
        smallest_of: variant -> likewise, where that variant alone is known to fail.
    """

    blamed: Mapping[VariantKey, str]
    largest: Mapping[VariantKey, int]
    smallest: int
    smallest_of: Mapping[VariantKey, int]

    def why(self, settings: Settings) -> str | None:
        """Why a variant is set aside; None where it is not."""
        have = set(settings.items())
        return next((why for blamed, why in self.blamed.items() if have.issuperset(blamed)), None)

    def bound(self, settings: Settings) -> int | None:
        """The largest micro-batch of a variant that is not known to be refused; None: any."""
        return self.largest.get(variant_key(settings))

    def least(self, settings: Settings) -> int:
        """The smallest micro-batch of a variant that is not known to fail."""
        return max(self.smallest, self.smallest_of.get(variant_key(settings), 1))


def exclusions_of(spec: SearchSpec, trials: Sequence[Trial]) -> Exclusions:
    """What these trials rule out."""
    blamed: dict[VariantKey, str] = {}
    largest: dict[VariantKey, int] = {}
    smallest, smallest_of = 1, dict[VariantKey, int]()
    plain = spec.space.baseline
    ran = [t.plan for t in trials if t.role is not Role.VETOED and t.measurement.step_times_s]
    works: set[tuple[str, Scalar]] = {pair for plan in ran for pair in plan.variant}
    works |= set(plain.variant)
    ran_variants = {plan.variant for plan in ran}
    for trial in trials:
        outcome, plan = trial.measurement.outcome, trial.plan
        if trial.role is Role.VETOED or outcome is Outcome.OK:
            continue
        worked = plan.variant in ran_variants
        larger = plan.micro_batch > plain.micro_batch
        of_size = outcome in _ACCIDENTS or (larger and outcome in _OF_THE_TRAINING)
        if outcome.about_memory or outcome in _ABOUT_SIZE or (worked and of_size):
            below = plan.micro_batch - 1
            largest[plan.variant] = min(below, largest.get(plan.variant, below))
        elif plan.variant == plain.variant and plan.micro_batch < plain.micro_batch:
            smallest = max(smallest, plan.micro_batch + 1)
        elif outcome is Outcome.UNSUPPORTED and plan.micro_batch < plain.micro_batch:
            # Whether its size or its settings are to blame shows where the baseline ran.
            smallest_of[plan.variant] = plain.micro_batch
        else:
            blamed[_blame(plan.variant, works)] = _reason(trial)
    return Exclusions(blamed, largest, smallest, smallest_of)


def _blame(variant: VariantKey, works: set[tuple[str, Scalar]]) -> VariantKey:
    """The settings of a failing variant that never worked; all of them where each did."""
    return tuple(pair for pair in variant if pair not in works) or variant


def _reason(trial: Trial) -> str:
    detail = trial.measurement.detail
    return trial.measurement.outcome.value + (f": {detail}" if detail else "")


# The micro-batches a plan may have, and rounding down to them.
#
# With a global batch of G samples they are ceil(G / k); without one, every whole number. Where the
# accumulation may not change, there is one.

MicroBatches = NDArray[np.int64]


class Sizes:
    """The micro-batches of each variant of a space, from some smallest one up.

    Args:
        space: the space.
        smallest: per variant, no micro-batch below this is offered.

    Attributes:
        smallest: per variant, the smallest micro-batch that is offered.
    """

    def __init__(self, space: Space, smallest: Sequence[int]) -> None:
        self._whole = space.global_batch
        self._largest = space.largest_micro_batch
        self._fixed = space.only_micro_batch
        self.smallest = np.array([self._fixed or self._at_least(size) for size in smallest])

    def down(self, wanted: Array) -> MicroBatches:
        """The largest micro-batches up to those wanted, (variants) or (worlds, variants).

        0 where there is none.
        """
        size = np.floor(np.clip(wanted, 0, self._largest)).astype(np.int64)
        if self._fixed is not None:
            return np.where(size >= self._fixed, self._fixed, 0)
        if self._whole is not None:
            size = self._evenly(np.maximum(size, 1)) * (size >= 1)
        return np.where(size >= self.smallest, size, 0)

    def handy(self, wanted: Array) -> MicroBatches:
        """Like `down`, rounded to about two digits: a person reads 768 with more ease than 771.

        Where a global batch decides the micro-batches, they stay as they are.
        """
        size = self.down(wanted)
        if self._whole is not None or self._fixed is not None:
            return size
        grain = 2 ** np.maximum(0, np.floor(np.log2(np.maximum(size, 1))).astype(np.int64) - 6)
        handy: MicroBatches = np.maximum(size // grain * grain, np.minimum(size, self.smallest))
        return handy

    def _evenly(self, size: MicroBatches) -> MicroBatches:
        assert self._whole is not None
        steps = -(-self._whole // size)
        even: MicroBatches = -(-self._whole // steps)
        return even

    def _at_least(self, size: int) -> int:
        """The smallest micro-batch that is no smaller than that."""
        if self._whole is None or size <= 1:
            return size
        steps = max(1, -(-self._whole // (size - 1)) - 1)
        return -(-self._whole // steps)
