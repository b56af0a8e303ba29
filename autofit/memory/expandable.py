"""Expandable segments: one growing segment per pool instead of many of fixed size.

Follows `ExpandableSegment` and `try_allocate_expandable_block` of CUDACachingAllocator.cpp:
addresses are plentiful and memory is mapped to them page by page, so scattered free memory can be
unmapped and mapped again where a large request needs it in one piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from autofit.memory.blocks import LARGE_SEGMENT_BYTES, Block, Pool, round_up

CONFIGURED_BY = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the allocator's options; torch reads the first that is set."""
_ADDRESSES_PER_SEGMENT = LARGE_SEGMENT_BYTES << 24  # whole pages of either pool


def expandable_segments() -> bool:
    """Return whether the environment enables expandable segments of the allocator."""
    options = next((os.environ[name] for name in CONFIGURED_BY if name in os.environ), "")
    return "expandable_segments:true" in options.lower()


class ExpandableSegments:
    """The segments of both pools.

    Args:
        reserve: takes that many bytes more, or returns False.
        release: returns that many bytes.
    """

    def __init__(self, reserve: Callable[[int], bool], release: Callable[[int], None]) -> None:
        self._reserve, self._release = reserve, release
        self._heads: dict[bool, Block] = {}

    def best_fit(self, pool: Pool, size: int) -> Block | None:
        """Remove and return the free block that should serve a request; None without one.

        Of blocks that are large enough, a later one is preferred while it could grow less, which
        keeps the end of the segment free for growing.
        """
        candidates = pool.candidates(size)
        if not candidates:
            return None
        best = candidates[0]
        for other in candidates[1:]:
            if _size_when_grown(other) >= _size_when_grown(best):
                break
            best = other
        pool.remove(best)
        return best

    def grow(self, pool: Pool, size: int) -> Block | None:
        """Return a block of at least `size` bytes, newly mapped; None if there is no room."""
        block = self._room(pool, size)
        while block.size < size or not block.available:
            unmapped = block if not block.mapped else block.next
            assert unmapped is not None
            missing = size - block.size * block.available
            mapped_bytes = min(round_up(missing, pool.page_bytes), unmapped.size)
            if not self._reserve(mapped_bytes):
                return None
            if mapped_bytes < unmapped.size:
                unmapped.cut(mapped_bytes)
            unmapped.mapped = True
            block = pool.add(unmapped)
        pool.remove(block)
        return block

    def release(self, pool: Pool) -> None:
        """Unmap every whole page of free memory."""
        for block in list(pool):
            start = round_up(block.address, pool.page_bytes)
            end = (block.address + block.size) // pool.page_bytes * pool.page_bytes
            if start < end:
                self._unmap(pool, block, start, end)

    def _room(self, pool: Pool, size: int) -> Block:
        """Return the first block that begins `size` bytes of free or unmapped addresses."""
        address = _ADDRESSES_PER_SEGMENT * (1 + pool.small)
        whole = Block(pool, address, _ADDRESSES_PER_SEGMENT, mapped=False)
        block: Block | None = self._heads.setdefault(pool.small, whole)
        while block is not None:
            if not block.mapped:
                before = block.previous
                start = before if before is not None and before.available else block
                if _reach(start, size):
                    return start
            block = block.next
        raise AssertionError("the addresses of a segment never end")

    def _unmap(self, pool: Pool, block: Block, start: int, end: int) -> None:
        """Unmap the addresses from `start` to `end` of a free block."""
        pool.remove(block)
        if start > block.address:
            rest = block.cut(start - block.address)
            pool.add(block)
            block = rest
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address))
        block.mapped = False
        self._release(block.size)
        if block.next is not None and not block.next.mapped:
            block.absorb_next()
        if block.previous is not None and not block.previous.mapped:
            block.previous.absorb_next()


def _size_when_grown(block: Block) -> int:
    following = block.next
    return block.size + (0 if following is None or following.mapped else following.size)


def _reach(block: Block | None, size: int) -> bool:
    """Return whether free or unmapped blocks from this one on add up to `size` bytes."""
    while block is not None and (block.available or not block.mapped):
        size -= block.size
        if size <= 0:
            return True
        block = block.next
    return False
