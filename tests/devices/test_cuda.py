"""The CUDA device: its budget is enforced, its memory is read, and NVML may refuse."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.cuda import CudaDevice
from autofit.devices.nvml import (
    CONTEXT_BYTES,
    LIBRARY_BYTES,
    Nvml,
    ProcessMemory,
    device_uuid,
    process_that_grew,
)
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.training.workload import Workload
from autofit.units import GIB, MIB


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    yield CudaDevice("cuda:0")
    gc.collect()
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.cuda
def test_memory_ends_at_the_budget_and_computing_goes_on(device: CudaDevice) -> None:
    budget = device.read().non_torch_bytes + 256 * MIB
    device.limit(budget)
    device.reset_peaks()
    model = device.place_model(nn.Linear(1024, 1024))
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(2**18, 1024, device=device.torch_device))
    gc.collect()
    device.check_health()
    reading = device.read()
    assert reading.peak_reserved_bytes + reading.non_torch_bytes <= budget + 2 * MIB


@pytest.mark.cuda
def test_what_is_placed_counts_and_what_is_freed_does_not(device: CudaDevice) -> None:
    device.release_cache()
    before = device.read()
    held = device.place(torch.ones(64 * MIB, dtype=torch.uint8))
    device.synchronize()
    assert device.allocated_bytes() - before.allocated_bytes == 64 * MIB
    assert device.read().non_torch_bytes == pytest.approx(before.non_torch_bytes, abs=32 * MIB)
    del held
    device.release_cache()
    device.reset_peaks()
    assert device.read().peak_allocated_bytes == before.allocated_bytes


@pytest.mark.cuda
@pytest.mark.parametrize(
    "reset",
    [
        torch.cuda.reset_peak_memory_stats,
        torch.cuda.reset_max_memory_allocated,
        *filter(None, [getattr(torch.accelerator, "reset_peak_memory_stats", None)]),  # from 2.9
    ],
)
def test_a_peak_is_known_where_the_training_resets_it(
    device: CudaDevice, reset: Callable[[], None]
) -> None:
    device.reset_peaks()
    before = device.read()
    held = torch.empty(256 * MIB, dtype=torch.uint8, device=device.torch_device)
    del held
    torch.cuda.empty_cache()
    reset()
    assert torch.cuda.max_memory_reserved() < before.reserved_bytes + 256 * MIB  # as users expect
    after = device.read()
    assert after.peak_allocated_bytes >= before.allocated_bytes + 256 * MIB
    assert after.peak_reserved_bytes >= 256 * MIB
    device.reset_peaks()
    assert device.read().peak_reserved_bytes == device.read().reserved_bytes


@pytest.mark.cuda
def test_flushes_are_counted_where_the_training_resets_their_number(device: CudaDevice) -> None:
    device.limit(device.read().non_torch_bytes + 256 * MIB)
    before = device.read().allocator_retries
    for _ in range(2):
        kept = torch.empty(150 * MIB, dtype=torch.uint8, device=device.torch_device)
        del kept
        kept = torch.empty(200 * MIB, dtype=torch.uint8, device=device.torch_device)
        del kept
        torch.cuda.reset_accumulated_memory_stats()
        torch.cuda.empty_cache()
    assert device.read().allocator_retries >= before + 2


class Logs(nn.Module):
    """Takes much for a moment, and then begins its count anew, as loops that log memory do."""

    def __init__(self, *, lifts_the_cap: bool) -> None:
        super().__init__()
        self.layer, self.lifts_the_cap = nn.Linear(16, 16), lifts_the_cap

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.is_cuda:
            if self.lifts_the_cap:
                torch.cuda.set_per_process_memory_fraction(1.0)
            torch.empty(400 * MIB, dtype=torch.uint8, device=inputs.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return self.layer(inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("lifts_the_cap", [False, True])
def test_a_training_that_resets_its_peak_is_held_to_the_budget(lifts_the_cap: bool) -> None:
    workload = Workload(Logs(lifts_the_cap=lifts_the_cap), torch.randn(4, 16))
    with open_prober(workload, (), Target("cuda:0", "4GiB")) as prober:
        plain: Any = prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement
        assert plain.ok
        assert plain.peak_reserved_bytes >= 400 * MIB
        budget = plain.held_bytes - 100 * MIB
        less = prober.probe(ProbeRequest(ResolvedPlan(Plan(4)), budget)).measurement
    assert less.outcome is (Outcome.OVER_BUDGET if lifts_the_cap else Outcome.OOM)


@pytest.mark.cuda
def test_a_batch_is_staged_in_pinned_memory_unless_it_lies_on_the_gpu(device: CudaDevice) -> None:
    assert device.stage(torch.ones(4)).is_pinned()
    there = torch.ones(4, device=device.torch_device)
    assert device.stage(there) is there
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(device.stage(sparse).to_dense(), torch.eye(4))


@pytest.mark.cuda
def test_marks_are_times_of_the_device(device: CudaDevice) -> None:
    matrix = torch.randn(2048, 2048, device=device.torch_device)
    first = device.mark()
    for _ in range(10):
        matrix = matrix @ matrix
    last = device.mark()
    device.synchronize()
    assert device.seconds_between(first, last) > 0


@pytest.mark.cuda
@pytest.mark.real_gpu  # an emulated one copies at once
def test_a_batch_that_is_let_go_while_it_is_copied_arrives_whole(device: CudaDevice) -> None:
    staged = device.stage(torch.ones(MIB))
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]  # torch left it so
    placed = device.place(staged)
    del staged
    for _ in range(4):
        device.stage(torch.ones(MIB)).zero_()
    device.synchronize()
    assert placed.sum().item() == MIB


OPENS = """
from autofit.devices.cuda import CudaDevice
from autofit.errors import DeviceUnavailable
try:
    CudaDevice("cuda")
except DeviceUnavailable as refusal:
    print(refusal)
"""


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0", ["PYTORCH_NO_CUDA_MEMORY_CACHING='0'", "unset it"]),
        ("CUDA_VISIBLE_DEVICES", "", ["No CUDA GPUs are available", 'device="cpu"']),
    ],
)
def test_where_memory_cannot_be_counted_or_no_gpu_is_visible_it_says_why(
    name: str, value: str, words: list[str], run_python: Any
) -> None:
    ran = run_python("-c", OPENS, env=os.environ | {name: value}, forks_workers=False)
    assert all(each in ran.stdout for each in words), ran.stderr


ALONE = """
import gc, torch
from autofit.devices.cuda import CudaDevice
device = CudaDevice("cuda:0")
at_first = device.read()
matrix = torch.randn(256, 256, device="cuda:0", requires_grad=True)
(matrix @ matrix).sum().backward()  # a handle, with its workspace, in this thread and autograd's
device.synchronize()
with_libraries = device.read()
del matrix
gc.collect()
device.release_cache()
at_last = device.read()
print(at_last.allocated_bytes - at_first.allocated_bytes)
print(at_first.non_torch_bytes, with_libraries.non_torch_bytes)
"""


@pytest.mark.cuda
def test_workspaces_are_released_and_libraries_count_as_our_own(run_python: Any) -> None:
    """In a process of its own: there only what it makes itself is released."""
    ran = run_python("-c", ALONE, forks_workers=False)
    retained, counts = ran.stdout.splitlines()
    assert retained == "0"
    context, with_libraries = map(int, counts.split())
    assert 0 < context <= with_libraries


# -- NVML may refuse, and a device may go by several names


@pytest.mark.parametrize(
    ("visible", "index", "uuid"),
    [
        ("MIG-aaaa,MIG-bbbb", 1, "MIG-bbbb"),
        ("MIG-aaaa, MIG-bbbb ", 1, "MIG-bbbb"),
        ("MIG-GPU-aaaa/1/0", 0, "MIG-GPU-aaaa/1/0"),
    ],
)
def test_a_mig_slice_is_known_by_the_uuid_that_made_it_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str, index: int, uuid: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_uuid(index) == uuid


def test_where_nvml_refuses_every_answer_is_none() -> None:
    unknown = Nvml("GPU-00000000-0000-0000-0000-000000000000")
    answers = [unknown.used_bytes(), unknown.bytes_by_process(), unknown.busy_percent()]
    assert [*answers, unknown.driver()] == [None] * 4


@pytest.mark.cuda
def test_the_first_device_is_known() -> None:
    used = Nvml(device_uuid(0)).used_bytes()
    if used is None:
        pytest.skip("NVML is missing, or does not know the device")
    assert 0 <= used <= torch.cuda.get_device_properties(0).total_memory


CONTEXT = 500 * MIB


@pytest.mark.parametrize(
    ("context", "all_at_first", "all_later", "own"),
    [
        (CONTEXT, 3 * GIB + CONTEXT, [3 * GIB + CONTEXT], CONTEXT),
        (CONTEXT, GIB, [GIB + 200 * MIB], CONTEXT + 200 * MIB),
        (CONTEXT, GIB, [GIB + 200 * MIB, GIB], CONTEXT + 200 * MIB),
        (CONTEXT, GIB, [9 * GIB], CONTEXT + LIBRARY_BYTES),
        (CONTEXT, GIB, [9 * GIB, 9 * GIB + 100 * MIB], CONTEXT + LIBRARY_BYTES),
        (CONTEXT, 9 * GIB, [GIB], CONTEXT),
        (CONTEXT, 9 * GIB, [GIB, GIB + 200 * MIB], CONTEXT + 200 * MIB),
        (CONTEXT, GIB, [GIB + 100 * MIB, GIB] * 20, CONTEXT + 100 * MIB),
        (9 * GIB, 20 * GIB, [20 * GIB], CONTEXT_BYTES),
        (9 * GIB, 9 * GIB, [100 * MIB], 100 * MIB),
        (-GIB, GIB, [GIB], 0),
    ],
    ids=[
        "the context, and not what was there before it",
        "libraries that are loaded later",
        "they stay",
        "what grows beyond libraries is another process's",
        "it stays so",
        "what others give back",
        "it hides no growth of our own",
        "a process that comes and goes is not counted again",
        "a process that came while the context was made",
        "never more than all",
        "never less than nothing",
    ],
)
def test_what_a_process_holds_outside_of_its_allocator(
    context: int, all_at_first: int, all_later: list[int], own: int
) -> None:
    memory = ProcessMemory(context, all_at_first)
    assert [memory.outside_allocator(seen) for seen in all_later][-1] == own


BEFORE = {4711: 500 * MIB, 4712: GIB}


@pytest.mark.parametrize(
    ("before", "after", "by", "process"),
    [
        (BEFORE, {4711: 532 * MIB, 4712: GIB}, 32 * MIB, 4711),
        (BEFORE, {4711: 534 * MIB, 4712: 3 * GIB}, 32 * MIB, 4711),
        ({}, {4711: 34 * MIB}, 32 * MIB, 4711),
        # not one process alone
        (BEFORE, BEFORE, 32 * MIB, None),
        (BEFORE, {4711: 532 * MIB, 4712: GIB + 32 * MIB}, 32 * MIB, None),
        (BEFORE, {4711: 532 * MIB}, 0, None),
    ],
)
def test_the_process_that_grew_is_this_one(
    before: dict[int, int], after: dict[int, int], by: int, process: int | None
) -> None:
    assert process_that_grew(before, after, by) == process
