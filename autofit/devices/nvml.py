"""NVML's view of a GPU: what is used on it, and which process holds how much.

Nothing here creates a CUDA context, so a parent process may ask too. NVML counts devices in PCI
order and ignores CUDA_VISIBLE_DEVICES, so a device is found by its UUID, never by its index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class NvmlReading:
    """A device's memory as NVML sees it; `used_bytes` leaves out what the driver reserves."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


class Nvml:
    """NVML's view of one device; every method answers None where NVML refuses (MIG, containers)."""

    def __init__(self, uuid: str) -> None:
        self._handle = _handle(uuid)

    @property
    def is_there(self) -> bool:
        """Whether NVML knows the device by that UUID."""
        return self._handle is not None

    def read(self) -> NvmlReading | None:
        """Total, free and used bytes now."""
        info = self._ask(
            lambda nvml: nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2)
        )
        return info and NvmlReading(int(info.total), int(info.free), int(info.used))

    def bytes_by_process(self) -> dict[int, int] | None:
        """Process id -> bytes held on the device, as far as they are told.

        Inside a container the ids may be those of the host, or processes may be left out.
        """
        processes = self._ask(lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        if processes is None:
            return None
        return {each.pid: int(each.usedGpuMemory) for each in processes if each.usedGpuMemory}

    def driver(self) -> str | None:
        """The driver's version."""
        version = self._ask(lambda nvml: nvml.nvmlSystemGetDriverVersion())
        return version and str(version)

    def _ask(self, question: Callable[[Any], Any]) -> Any | None:
        """The answer; None where there is no handle, or NVML refuses."""
        if self._handle is None:
            return None
        import pynvml

        try:
            return question(pynvml)
        except Exception:  # where driver and bindings are of different ages it is no NVMLError
            return None


def device_uuid(index: int) -> str:
    """The UUID that NVML knows the visible device `index` by (GPU-... or MIG-...).

    torch says neither which of the two it is; a slice is a MIG one also where no variable made it
    visible.
    """
    listed = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if index < len(listed) and listed[index].startswith("MIG-"):
        return listed[index]
    bare = torch.cuda.get_device_properties(index).uuid
    names = [f"{kind}-{bare}" for kind in ("GPU", "MIG")]
    return next((name for name in names if Nvml(name).is_there), names[0])


def _handle(uuid: str) -> Any | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # NVML is missing, refuses, or does not know the UUID: a fallback exists
        return None


# How much of what is used on a GPU is this process's own.
#
# Beside what torch's allocator reserves, a process holds a context, and libraries (cuBLAS, cuDNN,
# NCCL) that are loaded when they are first used. NVML says it exactly, where it lists the process
# with its bytes; inside a container it often does not.

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
