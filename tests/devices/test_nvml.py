"""NVML may refuse, and a device may go by several names."""

from __future__ import annotations

import pytest
import torch

from autofit.devices.nvml import (
    CONTEXT_BYTES,
    LIBRARY_BYTES,
    Nvml,
    ProcessMemory,
    device_uuid,
    process_that_grew,
)


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
    assert unknown.used_bytes() is None
    assert unknown.bytes_by_process() is None
    assert unknown.busy_percent() is None
    assert unknown.driver() is None


@pytest.mark.cuda
def test_the_first_device_is_known() -> None:
    used = Nvml(device_uuid(0)).used_bytes()
    if used is None:
        pytest.skip("NVML is missing, or does not know the device")
    assert 0 <= used <= torch.cuda.get_device_properties(0).total_memory


MIB, GIB = 2**20, 2**30
CONTEXT = 500 * MIB


def test_the_context_is_our_own_and_what_was_there_before_it_is_not() -> None:
    assert ProcessMemory(CONTEXT, 3 * GIB + CONTEXT).outside_allocator(3 * GIB + CONTEXT) == CONTEXT


def test_libraries_that_are_loaded_later_are_our_own_and_stay_so() -> None:
    memory = ProcessMemory(CONTEXT, GIB)
    assert memory.outside_allocator(GIB + 200 * MIB) == CONTEXT + 200 * MIB
    assert memory.outside_allocator(GIB) == CONTEXT + 200 * MIB


def test_what_grows_beyond_libraries_is_another_processs() -> None:
    memory = ProcessMemory(CONTEXT, GIB)
    assert memory.outside_allocator(9 * GIB) == CONTEXT + LIBRARY_BYTES
    assert memory.outside_allocator(9 * GIB + 100 * MIB) == CONTEXT + LIBRARY_BYTES


def test_what_others_give_back_hides_no_growth_of_our_own() -> None:
    memory = ProcessMemory(CONTEXT, 9 * GIB)
    assert memory.outside_allocator(GIB) == CONTEXT
    assert memory.outside_allocator(GIB + 200 * MIB) == CONTEXT + 200 * MIB


def test_a_process_that_comes_and_goes_is_not_counted_again_each_time() -> None:
    memory = ProcessMemory(CONTEXT, GIB)
    for _ in range(20):
        memory.outside_allocator(GIB + 100 * MIB)
        memory.outside_allocator(GIB)
    assert memory.outside_allocator(GIB) == CONTEXT + 100 * MIB


def test_a_process_that_came_while_the_context_was_made_is_not_all_ours() -> None:
    assert ProcessMemory(9 * GIB, 20 * GIB).outside_allocator(20 * GIB) == CONTEXT_BYTES


def test_our_own_is_never_more_than_all() -> None:
    assert ProcessMemory(9 * GIB, 9 * GIB).outside_allocator(100 * MIB) == 100 * MIB
    assert ProcessMemory(-GIB, GIB).outside_allocator(GIB) == 0


def test_the_process_that_grew_is_this_one() -> None:
    before = {4711: 500 * MIB, 4712: GIB}
    assert process_that_grew(before, {4711: 532 * MIB, 4712: GIB}, 32 * MIB) == 4711
    assert process_that_grew(before, {4711: 534 * MIB, 4712: 3 * GIB}, 32 * MIB) == 4711
    assert process_that_grew({}, {4711: 34 * MIB}, 32 * MIB) == 4711


def test_where_it_is_not_one_process_alone_none_is() -> None:
    before = {4711: 500 * MIB, 4712: GIB}
    assert process_that_grew(before, before, 32 * MIB) is None
    assert process_that_grew(before, {4711: 532 * MIB, 4712: GIB + 32 * MIB}, 32 * MIB) is None
    assert process_that_grew(before, {4711: 532 * MIB}, 0) is None
