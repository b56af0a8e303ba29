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
"""

from __future__ import annotations

from autofit.memory.blocks import ROUNDING_BYTES, SMALL_REQUEST_BYTES, Addresses, Block, Pool
from autofit.memory.expandable import ExpandableSegments
from autofit.units import format_bytes


class OutOfBudget(Exception):
    """The limit left no room for a request, even after the cache was flushed.

    Args:
        requested_bytes: size of the request.
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

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least `nbytes`, to be given to `free`.

        Raises:
            OutOfBudget: the limit leaves no room for it.
        """
        size = -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES or ROUNDING_BYTES
        pool = self._pools[size <= SMALL_REQUEST_BYTES]
        if self._expandable is None:
            block = pool.take(size) or self._new_segment(pool, size)
            split_from = pool.split_from_bytes
        else:
            block = self._expandable.best_fit(pool, size) or self._expandable.grow(pool, size)
            split_from = ROUNDING_BYTES
        if block is None:
            block = self._retry(pool, size, nbytes)
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
            for block in [block for block in pool if block.fills_segment]:
                pool.remove(block)
                self._addresses[pool].give_back(block.address, block.size)
                self._release(block.size)

    def reset_peaks(self) -> None:
        """Restart both peaks at the current values."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _retry(self, pool: Pool, size: int, nbytes: int) -> Block:
        self.empty_cache()
        self.retries += 1
        grow = self._expandable.grow if self._expandable is not None else self._new_segment
        block = grow(pool, size)
        if block is None:
            raise OutOfBudget(nbytes, self)
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
