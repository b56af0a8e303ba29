"""The micro-batches a plan may have, and rounding down to them.

With a global batch of G samples they are ceil(G / k); without one, every whole number. Where the
accumulation may not change, there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autofit.curves import Array
from autofit.space import Space

Counts = NDArray[np.int64]


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

    def down(self, wanted: Array) -> Counts:
        """The largest micro-batches up to those wanted, (variants) or (worlds, variants).

        0 where there is none.
        """
        size = np.floor(np.clip(wanted, 0, self._largest)).astype(np.int64)
        if self._fixed is not None:
            return np.where(size >= self._fixed, self._fixed, 0)
        if self._whole is not None:
            size = self._evenly(np.maximum(size, 1)) * (size >= 1)
        return np.where(size >= self.smallest, size, 0)

    def handy(self, wanted: Array) -> Counts:
        """Like `down`, rounded to about two digits: a person reads 768 with more ease than 771.

        Where a global batch decides the micro-batches, they stay as they are.
        """
        size = self.down(wanted)
        if self._whole is not None or self._fixed is not None:
            return size
        grain = 2 ** np.maximum(0, np.floor(np.log2(np.maximum(size, 1))).astype(np.int64) - 6)
        handy: Counts = np.maximum(size // grain * grain, np.minimum(size, self.smallest))
        return handy

    def _evenly(self, size: Counts) -> Counts:
        assert self._whole is not None
        steps = -(-self._whole // size)
        even: Counts = -(-self._whole // steps)
        return even

    def _at_least(self, size: int) -> int:
        """The smallest micro-batch that is no smaller than that."""
        if self._whole is None or size <= 1:
            return size
        steps = max(1, -(-self._whole // (size - 1)) - 1)
        return -(-self._whole // steps)
