"""Where segments lie: the rule that recorded trainings of an H200 show."""

from __future__ import annotations

from autofit.memory.allocator import CachingAllocator
from autofit.memory.blocks import Addresses
from autofit.units import MIB


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


def test_after_a_flush_a_segment_takes_the_lowest_free_address() -> None:
    allocator = CachingAllocator()
    high, kept, low = (allocator.allocate(20 * MIB) for _ in range(3))
    allocator.free(high)
    allocator.free(low)
    allocator.empty_cache()
    again = allocator.allocate(20 * MIB)
    assert again.address == low.address < kept.address
