"""The simulated allocator against the rules of c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

import emulated_gpu
from autofit.memory.allocator import (
    VARIABLES,
    Addresses,
    Block,
    CachingAllocator,
    OutOfBudget,
    configured_by,
    expandable_segments,
    ignored_options,
)
from autofit.units import KIB, MIB
from emulated_gpu import Machine

RELEASE = 0
"""In place of a request: the cache is released."""


@pytest.mark.parametrize(
    ("options", "requests", "allocated_bytes", "reserved_bytes", "retries"),
    [
        # the size of a new segment
        ({}, [1], 512, 2 * MIB, 0),
        ({}, [1 * MIB], 1 * MIB, 2 * MIB, 0),
        ({}, [1 * MIB + 1], 1 * MIB + 512, 20 * MIB, 0),
        ({}, [10 * MIB - 512], 10 * MIB - 512, 20 * MIB, 0),
        ({}, [10 * MIB], 10 * MIB, 10 * MIB, 0),
        ({}, [10 * MIB + 1], 10 * MIB + 512, 12 * MIB, 0),
        ({}, [33 * MIB], 34 * MIB, 34 * MIB, 0),
        # small requests share one, and large ones do not use it
        ({}, [700 * KIB, 700 * KIB], 1400 * KIB, 2 * MIB, 0),
        ({}, [700 * KIB, 700 * KIB, 1 * MIB + 1], 1400 * KIB + MIB + 512, 22 * MIB, 0),
        # the large pool hands out whole a block with a rest of up to 1 MiB
        ({}, [12 * MIB, -1, 11 * MIB], 12 * MIB, 12 * MIB, 0),
        ({}, [12 * MIB, -1, 11 * MIB, -2, 11 * MIB - 512], 11 * MIB - 512, 12 * MIB, 0),
        # the cache is flushed before a request is refused
        ({"limit_bytes": 50 * MIB}, [30 * MIB, -1, 40 * MIB], 40 * MIB, 40 * MIB, 1),
        # expandable segments grow and shrink by pages
        ({"expandable_segments": True}, [30 * MIB], 30 * MIB, 40 * MIB, 0),
        ({"expandable_segments": True}, [30 * MIB, 30 * MIB], 60 * MIB, 60 * MIB, 0),
        (
            {"expandable_segments": True},
            [30 * MIB, 30 * MIB, -1, RELEASE],
            30 * MIB,
            40 * MIB,
            0,
        ),
        (
            {"expandable_segments": True},
            [30 * MIB, 30 * MIB, -1, RELEASE, -2, RELEASE],
            0,
            0,
            0,
        ),
    ],
)
def test_blocks_and_segments(
    options: dict[str, Any],
    requests: list[int],
    allocated_bytes: int,
    reserved_bytes: int,
    retries: int,
) -> None:
    """A request is of bytes, or below zero gives back the block of that number."""
    allocator, blocks = CachingAllocator(**options), list[Block]()
    for request in requests:
        if request > 0:
            blocks.append(allocator.allocate(request))
        elif request == RELEASE:
            allocator.empty_cache()
        else:
            allocator.free(blocks[-request - 1])
    found = allocator.allocated_bytes, allocator.reserved_bytes, allocator.retries
    assert found == (allocated_bytes, reserved_bytes, retries)


def test_peaks_and_their_reset() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (30 * MIB,) * 2
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (0, 30 * MIB)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_a_segment_with_a_live_block_survives_the_flush() -> None:
    allocator = CachingAllocator(limit_bytes=30 * MIB)
    first, _ = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    allocator.free(first)
    with pytest.raises(OutOfBudget, match=r"16\.0 MiB.* 30\.0 MiB.* 4\.00 MiB.* 16\.0 MiB"):
        allocator.allocate(16 * MIB)
    assert allocator.retries == 1
    allocator.allocate(10 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_no_two_live_blocks_overlap_and_the_books_balance(expandable: bool) -> None:
    chance = random.Random(0)
    allocator = CachingAllocator(limit_bytes=150 * MIB, expandable_segments=expandable)
    live: list[Block] = []
    for _ in range(1500):
        if live and chance.random() < 0.48:
            allocator.free(live.pop(chance.randrange(len(live))))
            continue
        try:
            live.append(allocator.allocate(int(2 ** chance.uniform(0, 25))))
        except OutOfBudget:
            for _ in range(len(live) // 2):
                allocator.free(live.pop())
        ranges = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= 150 * MIB
    assert allocator.retries > 0
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


# -- Where segments lie: the rule that recorded trainings of an H200 show


def test_new_segments_lie_below_the_others_and_freed_addresses_are_given_again_first() -> None:
    addresses, small = Addresses(100, upwards=False), Addresses(100, upwards=True)
    assert [small.take(2), small.take(2)] == [100, 102]
    first, second, third, last = (addresses.take(20) for _ in range(4))
    assert (first, last) == (80, 20)
    addresses.give_back(first, 20)
    addresses.give_back(third, 20)
    assert addresses.take(10) == third
    addresses.give_back(second, 20)
    assert addresses.take(50) == third + 10, "the three gaps are one"
    assert addresses.take(20) == 0


# -- Whether a process uses expandable segments: what its user chose


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in VARIABLES:
        monkeypatch.delenv(each, raising=False)


CUDA, ANY = VARIABLES
LOOK = """
import torch
from autofit.memory.allocator import expandable_segments
held = torch.empty(64, device="cuda")
print(torch.cuda.memory_snapshot()[0]["is_expandable"], expandable_segments())
"""


@pytest.mark.emulated
@pytest.mark.parametrize(
    "options", [{CUDA: True}, {ANY: True}, {CUDA: False, ANY: True}, {CUDA: True, ANY: False}]
)
def test_torch_reads_the_variable_that_is_read_here(
    options: dict[str, bool], machine: Machine
) -> None:
    variables = {name: f"expandable_segments:{value}" for name, value in options.items()}
    there = emulated_gpu.environment(machine=machine, values=False)
    out = subprocess.check_output([sys.executable, "-c", LOOK], env=there | variables, text=True)
    in_torch, here = out.split()
    assert here == in_torch


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", configured_by())
def test_either_variable_chooses_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not expandable_segments()
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    assert expandable_segments()


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("expandable_segments:True,backend:native", None),
        ("pinned_use_background_threads:True", None),
        ("max_split_size_mb:32", "max_split_size_mb:32"),
        ("garbage_collection_threshold: 0.6", "garbage_collection_threshold:0.6"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync"),
        (
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
            "roundup_power2_divisions:[256:1,512:2]",
        ),
        ("an_option_of_a_later_torch:1", "an_option_of_a_later_torch:1"),
    ],
)
def test_options_that_the_simulation_lacks_are_named(
    options: str, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ignored_options() is None
    monkeypatch.setenv(configured_by()[-1], options)
    said = ignored_options()
    assert (said is None) == (named is None)
    assert named is None or (said is not None and f"{named} of {configured_by()[-1]}" in said)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in str(ignored_options())
