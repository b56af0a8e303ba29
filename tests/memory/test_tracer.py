"""The tracer over real CPU computation, the meta device and compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autofit.memory.allocator import CachingAllocator
from autofit.memory.tracer import CompiledMemoryTracer, MemoryTracer, storages_of
from autofit.units import MIB


@pytest.fixture
def tracer() -> MemoryTracer:
    return MemoryTracer()


def test_views_and_in_place_operators_count_nothing(tracer: MemoryTracer) -> None:
    with tracer:
        tensor = torch.zeros(128)
        views = [tensor.view(2, 64), tensor[3:], tensor.t(), tensor.detach(), tensor.add_(1)]
        assert tracer.allocator.allocated_bytes == 512
        del tensor
    assert tracer.allocator.allocated_bytes == 512
    del views
    assert tracer.allocator.allocated_bytes == 0


def test_a_storage_that_was_seen_does_not_count_when_an_operator_returns_it(
    tracer: MemoryTracer,
) -> None:
    outside = torch.ones(1 * MIB)
    with tracer:
        viewed = outside.detach()
        assert tracer.allocator.allocated_bytes == 0
        same = torch.tensor(outside.numpy())
        assert tracer.allocator.allocated_bytes == 4 * MIB
        del same, viewed


def test_a_resized_storage_is_followed(tracer: MemoryTracer) -> None:
    with tracer:
        tensor = torch.empty(128)
        tensor.resize_(1024)
        assert tracer.allocator.allocated_bytes == 4096
    del tensor


def test_a_size_that_is_set_past_all_operators_is_followed_at_once() -> None:
    """As sharding frees and gathers parameters."""
    tracer, outside = MemoryTracer(record=True), torch.empty(128)
    plain = torch.UntypedStorage.resize_
    with tracer:
        tensor = torch.empty(1024)
        first = tracer.number_of(tensor)
        for size, held in ((0, 0), (8192, 8192), (4096, 4096)):
            tensor.untyped_storage().resize_(size)
            assert tracer.allocator.allocated_bytes == held
        outside.untyped_storage().resize_(4096)
        assert tracer.allocator.allocated_bytes == 4096, "it is not the device's"
        number = tracer.number_of(tensor)
        while number in tracer.resized:
            number = tracer.resized[number]
        assert number == first, "it is told what it was before"
    assert torch.UntypedStorage.resize_ is plain
    assert tracer.allocator.peak_allocated_bytes == 12288, "the new size before the old"
    del tensor


def test_only_the_traced_device_counts() -> None:
    tracer = MemoryTracer(device_type="meta")
    with tracer:
        host, meta = torch.ones(128), torch.ones(128, device="meta")
        assert tracer.allocator.allocated_bytes == 512
    del host, meta


def test_sparse_gradients_count(tracer: MemoryTracer) -> None:
    with tracer:
        table: Any = torch.nn.Embedding(10_000, 64, sparse=True)
        before = tracer.allocator.allocated_bytes
        table(torch.arange(256)).sum().backward()
        assert table.weight.grad.is_sparse
        gradient_bytes = tracer.allocator.allocated_bytes - before
        assert 256 * 64 * 4 <= gradient_bytes < 10_000 * 64 * 4


def test_scratch_memory_counts_while_it_is_used() -> None:
    tracer = MemoryTracer(CachingAllocator(limit_bytes=50 * MIB))
    tracer.allocate_in_order([20 * MIB, 10 * MIB])
    assert tracer.allocator.peak_allocated_bytes == 30 * MIB
    assert tracer.allocator.allocated_bytes == 0
    with pytest.raises(torch.OutOfMemoryError):
        tracer.allocate_in_order([20 * MIB, 40 * MIB])
    assert tracer.allocator.allocated_bytes == 0
    tracer.allocate_in_order([20 * MIB, None, 40 * MIB])
    assert tracer.allocator.peak_allocated_bytes == 40 * MIB


def test_tensor_subclasses_count_their_inner_tensors(tracer: MemoryTracer) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with tracer:
        pair = TwoTensor(torch.ones(128), torch.ones(128))  # type: ignore[no-untyped-call]  # torch's own
        assert tracer.allocator.allocated_bytes == 1024
        doubled = pair * 2
        assert tracer.allocator.allocated_bytes == 2048
        del pair, doubled
    assert tracer.allocator.allocated_bytes == 0


def test_a_sparse_tensor_has_one_for_each_part() -> None:
    dense = torch.eye(4)
    assert [s.nbytes() for s in storages_of(dense.to_sparse())] == [2 * 4 * 8, 4 * 4]
    assert len(storages_of(dense.to_sparse_csr())) == 3


# -- A tracer that lets code be compiled and sees what it allocates

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


@pytest.mark.parametrize(
    "take",
    [lambda: buffer(MIB), lambda: torch.empty(128).untyped_storage().resize_(4 * MIB)],
    ids=["buffer", "size that is set"],
)
def test_what_is_beyond_the_budget_is_out_of_memory(take: Callable[[], object]) -> None:
    tracer = CompiledMemoryTracer(CachingAllocator(limit_bytes=2 * MIB))
    with tracer.accounting(), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        take()
