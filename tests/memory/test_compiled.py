"""A tracer that lets code be compiled and sees what it allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.memory.allocator import CachingAllocator
from autofit.memory.tracer import CompiledMemoryTracer
from autofit.units import MIB

GUARDS: Any = torch._C._dynamo.guards  # where inductor's code finds how to allocate on a CPU


def buffer(elements: int) -> torch.Tensor:
    return GUARDS._empty_strided_cpu((elements,), (1,), torch.float32)


def test_buffers_of_compiled_code_count_until_they_are_collected() -> None:
    tracer, allocate = CompiledMemoryTracer(), GUARDS._empty_strided_cpu
    outside = buffer(1000)
    with tracer.accounting():
        made = buffer(1000)
        view = made[:10]
        assert tracer.allocator.allocated_bytes == 4096
        assert tracer.number_of(outside) is None
    del made
    assert tracer.allocator.allocated_bytes == 4096  # the view keeps it
    del view
    assert tracer.allocator.allocated_bytes == 0
    assert GUARDS._empty_strided_cpu is allocate


def test_a_buffer_beyond_the_budget_is_out_of_memory() -> None:
    tracer = CompiledMemoryTracer(CachingAllocator(limit_bytes=2 * MIB))
    with tracer.accounting(), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        buffer(MIB)


@pytest.mark.slow
def test_the_peak_of_compiled_code_is_that_of_torchs_own_allocator() -> None:
    """Counted by torch's profiler; the tracer rounds each buffer up to 512 bytes."""
    torch.manual_seed(0)
    first, last, x = torch.randn(64, 256), torch.randn(256, 64), torch.randn(128, 64)
    for weight in (first, last):
        weight.requires_grad_()

    @torch.compile(dynamic=False)
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.gelu(x @ first).cos() @ last).square().mean()

    def step() -> None:
        loss(x).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        first.grad = last.grad = None

    tracer = CompiledMemoryTracer()
    with tracer.accounting():
        step()  # compiles inside, and what it writes is seen from the start
        compiled = tracer.allocator.peak_allocated_bytes
        tracer.allocator.reset_peaks()
        step()
    assert tracer.allocator.peak_allocated_bytes == compiled
    with torch.profiler.profile(profile_memory=True) as profiled:
        step()
    held = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert compiled == pytest.approx(peak, rel=0.02)
