"""NVML's view of a GPU: what is used on it, and which process holds how much.

Nothing here creates a CUDA context, so a parent process may ask too. NVML counts devices in PCI
order and ignores CUDA_VISIBLE_DEVICES, so a device is found by its UUID, never by its index.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
