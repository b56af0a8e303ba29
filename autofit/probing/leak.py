"""Whether a training holds more after every step: a leak, or a cycle that waits for the collector.

In a healthy loop the bytes allocated at the end of an optimizer step are the same after every step,
to the byte (measured on an H200 and in the simulated allocator), so growth needs no statistics.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autofit.units import format_bytes

WINDOW_STEPS = 8
FEWEST_BOUNDARIES = 3
HORIZON_STEPS = 1_000_000
"""Growth that would not reach the budget within so many steps (a kept number) is no leak."""


@dataclass(frozen=True)
class Growth:
    """What a training adds to what it holds.

    Attributes:
        bytes_per_step: median growth from one step's end to the next.
        collectable: the garbage collector takes it back.
    """

    bytes_per_step: int
    collectable: bool

    def steps_until(self, headroom_bytes: int) -> int:
        """Steps until the growth has used up that much."""
        return max(headroom_bytes, 0) // self.bytes_per_step

    def is_leak(self, headroom_bytes: int) -> bool:
        """Whether a training of ordinary length would outgrow the budget."""
        return not self.collectable and self.steps_until(headroom_bytes) < HORIZON_STEPS

    def words(self, headroom_bytes: int) -> str:
        """What a person should know about it."""
        much = format_bytes(self.bytes_per_step)
        if self.collectable:
            return f"a reference cycle holds {much} of every step until garbage is collected"
        return (
            f"{much} more are held after every step: the budget is reached in about "
            f"{self.steps_until(headroom_bytes)} steps. Something keeps tensors, often a list of "
            "losses with their graphs: keep loss.item() or loss.detach()"
        )


def bytes_per_step(boundary_bytes: Sequence[int]) -> int | None:
    """Growth per step where every one of the last steps ended with more than the one before.

    Args:
        boundary_bytes: allocated bytes at the end of each step.

    Returns:
        None: no steady growth, or too few steps to tell.
    """
    recent = boundary_bytes[-WINDOW_STEPS - 1 :]
    if len(recent) < FEWEST_BOUNDARIES:
        return None
    steps = [after - before for before, after in pairwise(recent)]
    return int(statistics.median(steps)) if min(steps) > 0 else None


def growth(boundary_bytes: Sequence[int], collected_bytes: int) -> Growth | None:
    """The growth over these steps, None where there is none.

    Args:
        boundary_bytes: allocated bytes at the end of each step.
        collected_bytes: allocated bytes after a garbage collection that followed the last of them.
    """
    per_step = bytes_per_step(boundary_bytes)
    if per_step is None:
        return None
    grown = boundary_bytes[-1] - boundary_bytes[0]
    return Growth(per_step, collectable=boundary_bytes[-1] - collected_bytes > grown // 2)
