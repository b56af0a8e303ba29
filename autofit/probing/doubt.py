"""What the device's memory says about an answer: whether it may be believed as it stands.

An out-of-memory error that live tensors and the request do not add up to may be the allocator's
bad luck (a block whose release on another stream is pending, a cache in pieces), so it is tried
once more; where other processes hold what the budget allows, the plan's size is not to blame. A run
that held more than the device had spilled to host memory and is no fit. One that went over the
budget by the libraries it loaded is run again, with the allocator's cap beside them. Messages of
libraries mean a lack of memory only where memory was short.
"""

from __future__ import annotations

from dataclasses import replace

from autofit.devices.base import MemoryReading
from autofit.measurement import Measurement, Outcome
from autofit.probing.faults import Fault
from autofit.units import format_bytes

SHORT = 0.9
"""From this share of what the process can have, memory counts as short."""
CONTENDED_BYTES = 64 * 2**20
CONTENDED_SHARE = 0.01
"""Other processes' use has moved if it changed by more than both this much and this share."""


def memory_was_short(
    before: MemoryReading, after: MemoryReading, *, vram_budget_bytes: int, available_bytes: int
) -> bool:
    """Whether a probe came near the end of memory.

    Args:
        before: at its start.
        after: at its end, with the peaks since its start.
        vram_budget_bytes: what the process was allowed.
        available_bytes: the device's memory less what other processes hold.
    """
    held = after.peak_reserved_bytes + after.non_torch_bytes
    flushed = after.allocator_retries > before.allocator_retries
    return flushed or held >= SHORT * min(vram_budget_bytes, available_bytes)


def is_explained(fault: Fault, after: MemoryReading, *, vram_budget_bytes: int) -> bool:
    """Whether an out-of-memory error had to come: live bytes and the request exceed the budget."""
    if fault.requested_bytes is None:
        return False
    needed = after.peak_allocated_bytes + fault.requested_bytes + after.non_torch_bytes
    return needed > vram_budget_bytes


def spilled(measurement: Measurement, *, available_bytes: int) -> Measurement:
    """The measurement, over budget where the process held more than the device had for it."""
    held = measurement.held_bytes
    if not measurement.ok or held is None or held <= available_bytes:
        return measurement
    return replace(
        measurement,
        outcome=Outcome.OVER_BUDGET,
        detail=f"held {format_bytes(held)} where the device had {format_bytes(available_bytes)} "
        "left beside other processes: the rest lay in host memory",
    )


def only_libraries_went_over(
    measurement: Measurement, before: MemoryReading, vram_budget_bytes: int
) -> bool:
    """Whether a probe stayed within the cap that was set, and libraries were loaded beside it.

    The cap leaves room for the non-torch bytes of the moment it is set. Kernels and handles come
    as they are first used, so the first probe of a process is held to too loose a cap.
    """
    if measurement.outcome is not Outcome.OVER_BUDGET or measurement.peak_reserved_bytes is None:
        return False
    return measurement.peak_reserved_bytes + before.non_torch_bytes <= vram_budget_bytes


def has_moved(foreign_before: int | None, foreign_after: int | None, *, total_bytes: int) -> bool:
    """Whether other processes' use changed during a probe; False also where either is unknown."""
    if foreign_before is None or foreign_after is None:
        return False
    least = max(CONTENDED_BYTES, CONTENDED_SHARE * total_bytes)
    return abs(foreign_after - foreign_before) > least
