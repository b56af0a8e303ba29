"""A simulation of the CUDA caching allocator.

`CachingAllocator` takes allocations and releases in the order in which a process makes them and
answers as `torch.cuda.memory_stats` would: bytes in live blocks, bytes held in segments, the peaks
of both, and how often the cache was flushed because the limit was reached. It follows
c10/cuda/CUDACachingAllocator.cpp with default settings and one stream:

- sizes are rounded up to 512 bytes; up to 1 MiB a block comes from the small pool;
- a new segment has 2 MiB in the small pool; in the large one 20 MiB, or from 10 MiB on the
  request rounded up to 2 MiB;
- the smallest free block that is large enough is taken, the lowest address first; a rest of 512
  bytes or more (small pool) or above 1 MiB (large pool) is split off;
- a released block merges with its free neighbours in the segment;
- where a new segment would exceed the limit, every segment without a live block is released first
  (one retry), and only then is the request refused.

The limit means the same as `torch.cuda.set_per_process_memory_fraction`: it bounds the bytes in
segments. Addresses only break ties between equal sizes. Those of segments follow a rule that
recorded trainings show (`Addresses`): an emulated GPU gives them so, too.

A segment is a chain of blocks without gaps. A pool keeps the free ones of its size class in the
order in which the real allocator looks for them: smallest first, then lowest address.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from autofit.units import LARGE_SEGMENT_BYTES, MIB, format_bytes

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
    """The addresses of one pool's segments, which decide between equal blocks.

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


class OutOfBudget(Exception):
    """The limit left no room for a request, even after the cache was flushed.

    Args:
        requested_bytes: size of the segment that was to hold the request, as in torch's message.
        allocator: what refused it.
    """

    def __init__(self, requested_bytes: int, allocator: CachingAllocator) -> None:
        limit_bytes, allocated_bytes = allocator.limit_bytes or 0, allocator.allocated_bytes
        super().__init__(  # in the words of CUDA's allocator
            f"Tried to allocate {format_bytes(requested_bytes)}. {format_bytes(limit_bytes)} are "
            f"allowed. Of the allocated memory {format_bytes(allocated_bytes)} is allocated by "
            f"PyTorch, and {format_bytes(allocator.reserved_bytes - allocated_bytes)} is reserved "
            "by PyTorch but unallocated."
        )


class CachingAllocator:
    """An allocator with an optional limit on what its segments may hold.

    Args:
        limit_bytes: the limit; None: none. It may be changed at any time, for later allocations.
        expandable_segments: as with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

    Attributes:
        allocated_bytes: bytes in live blocks.
        reserved_bytes: bytes in segments.
        peak_allocated_bytes: most allocated bytes since `reset_peaks`.
        peak_reserved_bytes: most reserved bytes since then.
        retries: times the cache was flushed because the limit was reached.
    """

    def __init__(
        self, *, limit_bytes: int | None = None, expandable_segments: bool = False
    ) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self._pools = (Pool(small=False), Pool(small=True))
        self._addresses = {
            pool: Addresses(1 << (46 + pool.small), upwards=pool.small) for pool in self._pools
        }
        self._expandable = (
            ExpandableSegments(self._reserve, self._release) if expandable_segments else None
        )
        self._grow = self._expandable.grow if self._expandable is not None else self._new_segment

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least `nbytes`, to be given to `free`.

        Raises:
            OutOfBudget: the limit leaves no room for it.
        """
        size = -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES or ROUNDING_BYTES
        pool = self._pools[size <= SMALL_REQUEST_BYTES]
        if self._expandable is None:
            block, split_from = pool.take(size), pool.split_from_bytes
        else:
            block, split_from = self._expandable.best_fit(pool, size), ROUNDING_BYTES
        block = block or self._grow(pool, size) or self._retry(pool, size)
        if block.size - size >= split_from:
            pool.add(block.cut(size))
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Take back a block that `allocate` handed out, once."""
        self.allocated_bytes -= block.size
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Release segments (or whole pages) without a live block."""
        for pool in self._pools:
            if self._expandable is not None:
                self._expandable.release(pool)
                continue
            for block in [each for each in pool if each.previous is None and each.next is None]:
                pool.remove(block)
                self._addresses[pool].give_back(block.address, block.size)
                self._release(block.size)

    def reset_peaks(self) -> None:
        """Restart both peaks at the current values."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _retry(self, pool: Pool, size: int) -> Block:
        self.empty_cache()
        self.retries += 1
        if (block := self._grow(pool, size)) is None:
            raise OutOfBudget(pool.segment_bytes(size), self)
        return block

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        segment_bytes = pool.segment_bytes(size)
        if not self._reserve(segment_bytes):
            return None
        return Block(pool, self._addresses[pool].take(segment_bytes), segment_bytes)

    def _reserve(self, size: int) -> bool:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release(self, size: int) -> None:
        self.reserved_bytes -= size


# Expandable segments: one growing segment per pool instead of many of fixed size. Follows
# `ExpandableSegment` and `try_allocate_expandable_block` of CUDACachingAllocator.cpp: addresses are
# plentiful and memory is mapped to them page by page, so scattered free memory can be unmapped and
# mapped again where a large request needs it in one piece.

# Environment variables with the allocator's options.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_ADDRESSES_PER_SEGMENT = LARGE_SEGMENT_BYTES << 24  # whole pages of either pool


# Options that change no figure here: those that the simulation has, and those of host memory.
_HARMLESS = re.compile(r"expandable_segments|backend:native|pinned_|release_lock|use_cuda_host")
IGNORED = "ignored, the figures are those of PyTorch's defaults"
# Variables that change what a process holds, each as a whole.
_UNKNOWN_VARIABLES = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "CUBLASLT_WORKSPACE_SIZE")


def configured_by() -> tuple[str, ...]:
    """Return the variables that torch reads: it goes by the first that is set."""
    import torch  # the command line reads this file for --help

    return VARIABLES if torch.__version__ >= "2.10" else VARIABLES[:1]


def configured() -> tuple[str, str]:
    """Return the variable that torch goes by, and its options; ("", ""): none is set."""
    return next(
        ((name, os.environ[name]) for name in configured_by() if name in os.environ), ("", "")
    )


def expandable_segments() -> bool:
    """Return whether the environment enables expandable segments of the allocator."""
    return "expandable_segments:true" in re.sub(r"\s", "", configured()[1]).lower()


def ignored_options() -> str | None:
    """Return, in words, what the environment sets that the simulation ignores; None: nothing."""
    name, options = configured()
    each = re.split(r",(?![^\[]*\])", re.sub(r"\s", "", options))  # no comma within brackets
    ignored = [option for option in each if option and not _HARMLESS.match(option)]
    named = [f"{', '.join(ignored)} of {name}"] if ignored else []
    named += [variable for variable in _UNKNOWN_VARIABLES if os.environ.get(variable)]
    if not named:
        return None
    return f"{' and '.join(named)}: {IGNORED}"


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
        raise AssertionError("a segment always has room for another block")

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
