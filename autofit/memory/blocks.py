"""Blocks and pools of the simulated CUDA caching allocator.

A segment is a chain of blocks without gaps. A pool keeps the free ones of its size class in the
order in which the real allocator looks for them: smallest first, then lowest address.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from autofit.units import LARGE_SEGMENT_BYTES, MIB

ROUNDING_BYTES = 512
SMALL_REQUEST_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
OWN_SEGMENT_FROM_BYTES = 10 * MIB
OWN_SEGMENT_ROUNDING_BYTES = 2 * MIB


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


class Block:
    """A range of a segment: live, free, or (expandable segments) without memory mapped to it."""

    __slots__ = ("address", "available", "mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        # Whether it is in its pool's list of free blocks.
        self.available = False
        self.previous: Block | None = None
        self.next: Block | None = None

    def cut(self, size: int) -> Block:
        """Shorten this block to `size` bytes and return the rest, which follows it."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """Merge the block that follows into this one."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if self.next is not None:
            self.next.previous = self

    @property
    def fills_segment(self) -> bool:
        """Whether it is the only block of its segment."""
        return self.previous is None and self.next is None


class Pool:
    """The free blocks of one size class.

    Attributes:
        small: whether it serves requests up to 1 MiB.
        split_from_bytes: the smallest rest worth splitting off in a segment of fixed size.
        page_bytes: the size of a segment for requests that do not get one of their own, and the
            step in which an expandable segment grows.
    """

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.split_from_bytes = ROUNDING_BYTES if small else SMALL_REQUEST_BYTES + 1
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        # Entries are (size, address, block). Shorter tuples sort among them, and no two have the
        # same address, so blocks are never compared.
        self._free: list[Any] = []

    def __iter__(self) -> Any:
        return (entry[2] for entry in self._free)

    def take(self, size: int) -> Block | None:
        """Remove and return the smallest free block of at least `size` bytes."""
        at = bisect_left(self._free, (size,))
        if at == len(self._free):
            return None
        block: Block = self._free.pop(at)[2]
        block.available = False
        return block

    def candidates(self, size: int) -> list[Block]:
        """Return every free block of at least `size` bytes, in the order of the search."""
        return [entry[2] for entry in self._free[bisect_left(self._free, (size,)) :]]

    def add(self, block: Block) -> Block:
        """Make a block available; return it merged with its free neighbours."""
        following, before = block.next, block.previous
        if following is not None and following.available:
            self.remove(following)
            block.absorb_next()
        if before is not None and before.available:
            self.remove(before)
            before.absorb_next()
            block = before
        block.available = True
        insort(self._free, (block.size, block.address, block))
        return block

    def remove(self, block: Block) -> None:
        """Remove a free block from the list."""
        del self._free[bisect_left(self._free, (block.size, block.address))]
        block.available = False

    def segment_bytes(self, size: int) -> int:
        """Return the size of a new segment for a request of that (rounded) size."""
        if self.small or size < OWN_SEGMENT_FROM_BYTES:
            return self.page_bytes
        return round_up(size, OWN_SEGMENT_ROUNDING_BYTES)


class Addresses:
    """The addresses of one pool's segments, which decide what is taken of equal blocks.

    A rule found in recorded trainings of an H200, and that of the emulated GPU (its addresses.cpp):
    addresses never used before are given downwards, freed ones again from the lowest up; those of
    the small pool lie above all others and are given upwards.

    Args:
        first: the address below which, or from which on, new ones are given.
        upwards: whether they are given from there on.
    """

    def __init__(self, first: int, *, upwards: bool) -> None:
        self._lowest = self._highest = first
        self._upwards = upwards
        self._gaps: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """Return the address of a new segment of that many bytes."""
        for at, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[at : at + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        if self._upwards:
            self._highest += size
            return self._highest - size
        self._lowest -= size
        return self._lowest

    def give_back(self, begin: int, size: int) -> None:
        """Take back the address of a segment."""
        end = begin + size
        at = bisect_left(self._gaps, (begin, end))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end = self._gaps.pop(at)[1]
        if at and self._gaps[at - 1][1] == begin:
            begin = self._gaps.pop(at - 1)[0]
        insort(self._gaps, (begin, end))
