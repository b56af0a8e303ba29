"""The memory of a GPU and of its processes, through NVML.

Nothing here creates a CUDA context, so a parent process may use it. NVML counts devices in PCI
order and ignores CUDA_VISIBLE_DEVICES, so a device is found by its UUID, never by its index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any


class Nvml:
    """One device in NVML; methods return None where NVML refuses (MIG, containers)."""

    def __init__(self, uuid: str) -> None:
        self._handle = _handle(uuid)

    def used_bytes(self) -> int | None:
        """Return the bytes of all processes, without those that the driver reserves."""
        info = self._ask(
            lambda nvml: nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2)
        )
        return info and int(info.used)

    def bytes_by_process(self) -> dict[int, int] | None:
        """Return the bytes on the device by process id, for the processes that NVML lists.

        In a container the ids may be those of the host, and processes may be missing.
        """
        processes = self._ask(lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        if processes is None:
            return None
        return {each.pid: int(each.usedGpuMemory) for each in processes if each.usedGpuMemory}

    def busy_percent(self) -> int | None:
        """Return the share of the last second or less in which a kernel ran, in percent."""
        rates = self._ask(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(self._handle))
        return rates and int(rates.gpu)

    def driver(self) -> str | None:
        """Return the driver's version."""
        version = self._ask(lambda nvml: nvml.nvmlSystemGetDriverVersion())
        return version and str(version)

    def _ask(self, question: Callable[[Any], Any]) -> Any | None:
        """Return the answer; None where there is no handle, or NVML refuses."""
        if self._handle is None:
            return None
        import pynvml

        try:
            return question(pynvml)
        except Exception:  # not always an NVMLError: driver and bindings may differ in age
            return None


def device_uuid(index: int) -> str:
    """Return the UUID of the visible device `index` in NVML (GPU-... or MIG-...).

    torch does not tell which of the two it is, and a MIG slice may be visible without a variable.
    """
    import torch  # on demand: NVML answers without it

    listed = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if index < len(listed) and listed[index].startswith("MIG-"):
        return listed[index]
    bare = torch.cuda.get_device_properties(index).uuid
    names = [f"{kind}-{bare}" for kind in ("GPU", "MIG")]
    return next((name for name in names if _handle(name) is not None), names[0])


def _handle(uuid: str) -> Any | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # NVML is missing, refuses, or does not know the UUID
        return None


# Growth beyond this while a context is made includes other processes: a choice, not measured.
CONTEXT_BYTES = 2**30
# Later growth up to this is attributed to our own libraries: a choice, not measured.
LIBRARY_BYTES = 512 * 2**20


class ProcessMemory:
    """Estimates this process's bytes outside the allocator where NVML does not list the process.

    Outside the allocator a process holds a context, and libraries (cuBLAS, cuDNN, NCCL) that are
    loaded on first use. The growth while the context is made is ours, up to `CONTEXT_BYTES`. Later
    growth cannot be told from another process's: up to `LIBRARY_BYTES` it is ours, the rest is not.
    This errs towards too much, which makes plans smaller. Only larger allocations outside torch are
    missed (a communication library's buffers, another framework's). The estimate never falls, since
    libraries return nothing.

    Args:
        context_bytes: growth while the context was made; if it existed, all bytes in use on the
            device outside this process's allocator.
        outside_bytes: bytes in use on the device now outside this process's allocator.
    """

    def __init__(self, context_bytes: int, outside_bytes: int) -> None:
        self._context_bytes = min(max(context_bytes, 0), CONTEXT_BYTES)
        self._lowest_outside_bytes = outside_bytes
        self._library_bytes = 0

    def outside_allocator(self, outside_bytes: int) -> int:
        """Return this process's part of the bytes in use outside its allocator now."""
        grown = min(outside_bytes - self._lowest_outside_bytes, LIBRARY_BYTES)
        self._library_bytes = max(self._library_bytes, grown)
        self._lowest_outside_bytes = min(self._lowest_outside_bytes, outside_bytes)
        return min(self._context_bytes + self._library_bytes, outside_bytes)


def process_that_grew(
    before: Mapping[int, int], after: Mapping[int, int], grown_bytes: int
) -> int | None:
    """Return the only process that grew by at least this much and less than twice; else None."""
    processes = [
        process
        for process, nbytes in after.items()
        if grown_bytes <= nbytes - before.get(process, 0) < 2 * grown_bytes
    ]
    return processes[0] if len(processes) == 1 and grown_bytes > 0 else None
