"""What memory says about an answer, row by row."""

from __future__ import annotations

import pytest
import torch

from autofit.devices.base import MemoryReading
from autofit.measurement import Measurement, Outcome
from autofit.probing.doubt import has_moved, is_explained, memory_was_short, spilled
from autofit.probing.faults import fault_of
from autofit.units import GIB, MIB


def reading(
    *, allocated_gib: float = 0, reserved_gib: float = 0, non_torch_gib: float = 0, retries: int = 0
) -> MemoryReading:
    return MemoryReading(
        allocated_bytes=0,
        reserved_bytes=0,
        peak_allocated_bytes=int(allocated_gib * GIB),
        peak_reserved_bytes=int(reserved_gib * GIB),
        non_torch_bytes=int(non_torch_gib * GIB),
        allocator_retries=retries,
    )


@pytest.mark.parametrize(
    ("after", "available_gib", "short"),
    [
        (reading(reserved_gib=5, retries=3), 80, False),
        (reading(reserved_gib=9.5, retries=3), 80, True),
        (reading(reserved_gib=8.6, non_torch_gib=0.6, retries=3), 80, True),
        (reading(reserved_gib=5, retries=3), 5.2, True),
        (reading(reserved_gib=5, retries=4), 80, True),
    ],
)
def test_memory_was_short(after: MemoryReading, available_gib: float, short: bool) -> None:
    before = reading(retries=3)
    told = memory_was_short(
        before, after, vram_budget_bytes=10 * GIB, available_bytes=int(available_gib * GIB)
    )
    assert told is short


@pytest.mark.parametrize(
    ("message", "allocated_gib", "explained"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of", 9, True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of", 7, False),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total", 9.995, True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 9, False),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", 9, False),
    ],
)
def test_an_oom_is_explained_by_live_bytes(
    message: str, allocated_gib: float, explained: bool
) -> None:
    fault = fault_of(torch.OutOfMemoryError(message))
    after = reading(allocated_gib=allocated_gib)
    assert is_explained(fault, after, vram_budget_bytes=10 * GIB) is explained


def test_what_lay_in_host_memory_is_no_fit() -> None:
    ran = Measurement(Outcome.OK, peak_reserved_bytes=9 * GIB, non_torch_bytes=GIB)
    assert spilled(ran, available_bytes=10 * GIB) is ran
    found = spilled(ran, available_bytes=10 * GIB - 1)
    assert found.outcome is Outcome.OVER_BUDGET
    assert found.detail is not None
    assert "host memory" in found.detail
    failed = Measurement(Outcome.OOM, peak_reserved_bytes=9 * GIB)
    assert spilled(failed, available_bytes=GIB) is failed


@pytest.mark.parametrize(
    ("before", "after", "total", "moved"),
    [
        (0, 0, 80 * GIB, False),
        (GIB, GIB + 100 * MIB, 80 * GIB, False),
        (GIB, 3 * GIB, 80 * GIB, True),
        (3 * GIB, GIB, 80 * GIB, True),
        (0, 65 * MIB, GIB, True),
        (None, GIB, 80 * GIB, False),
        (GIB, None, 80 * GIB, False),
    ],
)
def test_others_have_moved(before: int | None, after: int | None, total: int, moved: bool) -> None:
    assert has_moved(before, after, total_bytes=total) is moved
