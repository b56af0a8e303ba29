"""How much of what is used on a GPU is this process's own.

Beside what torch's allocator reserves, a process holds a context, and libraries (cuBLAS, cuDNN,
NCCL) that are loaded when they are first used. NVML says it exactly, where it lists the process
with its bytes; inside a container it often does not.
"""

from __future__ import annotations

from collections.abc import Mapping

CONTEXT_BYTES = 2**30
"""A context that seems to take more than this is not seen alone: a choice, no measurement."""
LIBRARY_BYTES = 512 * 2**20
"""So much growth beside the allocator is taken for our own libraries: a choice, no measurement."""


class Share:
    """This process's part of the bytes beside its allocator, where NVML does not list it.

    What was added while the context was made is ours, up to `CONTEXT_BYTES`. Later growth cannot be
    told from another process's: it is ours up to `LIBRARY_BYTES` and another's beyond. That errs on
    the side of holding too much, which makes plans smaller and never too large; only allocations
    beside torch's that are larger than these (a communication library's buffers, another
    framework's) are missed. What was ours stays ours, since libraries give nothing back.

    Args:
        context_bytes: what was added while the context was made; where it was there already, all
            that is used beside this process's allocator.
        outside_bytes: all that is used on the device now beside this process's allocator.
    """

    def __init__(self, context_bytes: int, outside_bytes: int) -> None:
        self._context_bytes = min(max(context_bytes, 0), CONTEXT_BYTES)
        self._lowest_outside_bytes = outside_bytes
        self._library_bytes = 0

    def of(self, outside_bytes: int) -> int:
        """This process's part of what is used beside its allocator now."""
        grown = min(outside_bytes - self._lowest_outside_bytes, LIBRARY_BYTES)
        self._library_bytes = max(self._library_bytes, grown)
        self._lowest_outside_bytes = min(self._lowest_outside_bytes, outside_bytes)
        return min(self._context_bytes + self._library_bytes, outside_bytes)


def who_grew(before: Mapping[int, int], after: Mapping[int, int], grown_bytes: int) -> int | None:
    """The one process whose bytes grew by so much (and by less than twice that); None: not one."""
    found = [
        process
        for process, held in after.items()
        if grown_bytes <= held - before.get(process, 0) < 2 * grown_bytes
    ]
    return found[0] if len(found) == 1 and grown_bytes > 0 else None
