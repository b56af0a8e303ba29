"""The simulated allocator against the rules of c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from autofit.memory.allocator import (
    CONFIGURED_BY,
    Addresses,
    Block,
    CachingAllocator,
    OutOfBudget,
    expandable_segments,
    ignored_options,
)
from autofit.units import KIB, MIB


@pytest.mark.parametrize(
    ("request_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (1 * MIB, 2 * MIB),
        (1 * MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_size_of_a_new_segment(request_bytes: int, segment_bytes: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(request_bytes)
    assert allocator.reserved_bytes == segment_bytes


def test_small_requests_share_a_segment_and_large_ones_do_not_use_it() -> None:
    allocator = CachingAllocator()
    allocator.allocate(700 * KIB)
    allocator.allocate(700 * KIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1 * MIB + 1)
    assert allocator.reserved_bytes == 22 * MIB


def test_peaks_and_their_reset() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (30 * MIB,) * 2
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (0, 30 * MIB)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_the_cache_is_flushed_before_a_request_is_refused() -> None:
    allocator = CachingAllocator(limit_bytes=50 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(40 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 40 * MIB)


def test_a_segment_with_a_live_block_survives_the_flush() -> None:
    allocator = CachingAllocator(limit_bytes=30 * MIB)
    first, _ = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    allocator.free(first)
    with pytest.raises(OutOfBudget, match=r"16\.0 MiB.* 30\.0 MiB.* 4\.00 MiB.* 16\.0 MiB"):
        allocator.allocate(16 * MIB)
    assert allocator.retries == 1
    allocator.allocate(10 * MIB)


def test_expandable_segments_grow_and_shrink_by_pages() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    second = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


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


def test_new_segments_lie_below_the_others_and_small_ones_above() -> None:
    large, small = Addresses(100, upwards=False), Addresses(100, upwards=True)
    assert [large.take(20), large.take(30)] == [80, 50]
    assert [small.take(2), small.take(2)] == [100, 102]


def test_freed_addresses_are_given_again_from_the_lowest_up() -> None:
    addresses = Addresses(100, upwards=False)
    first, second, third, _ = (addresses.take(20) for _ in range(4))
    addresses.give_back(first, 20)
    addresses.give_back(third, 20)
    assert addresses.take(10) == third
    addresses.give_back(second, 20)
    assert addresses.take(50) == third + 10, "the three gaps are one"
    assert addresses.take(20) == 0


# -- Whether a process uses expandable segments: what its user chose


@pytest.mark.parametrize("name", CONFIGURED_BY)
def test_either_variable_chooses_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in CONFIGURED_BY:
        monkeypatch.delenv(each, raising=False)
    assert not expandable_segments()
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    assert expandable_segments()


def test_the_large_pool_hands_out_whole_a_block_with_a_rest_of_up_to_1_mib() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    taken = allocator.allocate(11 * MIB)
    assert (taken.size, allocator.allocated_bytes) == (12 * MIB, 12 * MIB)
    allocator.free(taken)
    assert allocator.allocate(11 * MIB - 512).size == 11 * MIB - 512


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
    for each in CONFIGURED_BY:
        monkeypatch.delenv(each, raising=False)
    assert ignored_options() is None
    monkeypatch.setenv(CONFIGURED_BY[1], options)
    said = ignored_options()
    assert (said is None) == (named is None)
    assert named is None or (said is not None and f"{named} of {CONFIGURED_BY[1]}" in said)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in str(ignored_options())
