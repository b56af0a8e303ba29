"""The CUDA device: its budget is enforced, its memory is read, and NVML may refuse."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autofit.devices.cuda import CudaDevice, Nvml, device_uuid
from autofit.errors import DeviceUnavailable

MIB = 2**20


def test_a_mig_slice_is_known_by_the_uuid_that_made_it_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa,MIG-bbbb")
    assert device_uuid(1) == "MIG-bbbb"


def test_where_nvml_refuses_every_answer_is_none() -> None:
    unknown = Nvml("GPU-00000000-0000-0000-0000-000000000000")
    assert unknown.read() is None
    assert unknown.process_bytes(os.getpid()) is None
    assert unknown.driver() is None


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    opened = CudaDevice("cuda:0")
    yield opened
    opened.limit(opened.total_bytes)
    gc.collect()
    opened.release_cache()


@pytest.mark.cuda
def test_memory_ends_at_the_budget_and_computing_goes_on(device: CudaDevice) -> None:
    budget = device.read().non_torch_bytes + 256 * MIB
    device.limit(budget)
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
def test_marks_are_times_of_the_device(device: CudaDevice) -> None:
    matrix = torch.randn(2048, 2048, device=device.torch_device)
    first = device.mark()
    for _ in range(10):
        matrix = matrix @ matrix
    last = device.mark()
    device.synchronize()
    assert last.seconds_since(first) > 0


@pytest.mark.cuda
def test_it_says_what_it_is(device: CudaDevice) -> None:
    assert device.environment.gpu == torch.cuda.get_device_name(0)
    assert device.capabilities.device_type == "cuda"
    assert 0 < device.free_bytes <= device.total_bytes
    with pytest.raises(DeviceUnavailable, match="torch sees"):
        CudaDevice(f"cuda:{torch.cuda.device_count()}")
