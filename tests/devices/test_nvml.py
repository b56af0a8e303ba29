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
