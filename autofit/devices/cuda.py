"""An NVIDIA GPU: the budget is enforced by torch's own allocator, memory is read through NVML.

The functions at the top (`nvml_*`, `visible_uuid`) create no CUDA context, so a parent process may
call them. `CudaDevice` creates one, and belongs in the worker. NVML counts devices in PCI order
and ignores CUDA_VISIBLE_DEVICES, so a device is found there by its UUID, never by its index.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autofit.devices.base import Environment, MemoryReading
from autofit.errors import DeviceUnavailable
from autofit.strategy import Capabilities


@dataclass(frozen=True)
class NvmlReading:
    """A device's memory as NVML sees it; `used_bytes` leaves out what the driver reserves."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


class Nvml:
    """NVML's view of one device; every method answers None where NVML refuses (MIG, containers)."""

    def __init__(self, uuid: str) -> None:
        self._handle = _nvml_handle(uuid)

    def read(self) -> NvmlReading | None:
        """Total, free and used bytes now."""
        import pynvml

        if self._handle is None:
            return None
        try:
            info = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
        except pynvml.NVMLError:
            return None
        return NvmlReading(int(info.total), int(info.free), int(info.used))

    def process_bytes(self, pid: int) -> int | None:
        """What one process holds on the device; None also where NVML hides it (pid namespaces)."""
        import pynvml

        if self._handle is None:
            return None
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except pynvml.NVMLError:
            return None
        held = [process.usedGpuMemory for process in processes if process.pid == pid]
        return int(held[0]) if held and held[0] else None

    def driver(self) -> str | None:
        """The driver's version."""
        import pynvml

        if self._handle is None:
            return None
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError:
            return None


def _nvml_handle(uuid: str) -> Any | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # NVML is missing, refuses, or does not know the UUID: a fallback exists
        return None


def device_uuid(index: int) -> str:
    """The UUID that NVML knows the visible device `index` by (GPU-... or MIG-...)."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(listed) and listed[index].startswith("MIG-"):
        return listed[index]
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


class CudaDevice:
    """A GPU held by this process; making one creates the CUDA context.

    Raises:
        DeviceUnavailable: there is no CUDA device, or not that one.
    """

    tracked_steps = 0

    def __init__(self, name: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise DeviceUnavailable(f"{name} was asked for, and torch finds no CUDA device here")
        index = torch.device(name).index or 0
        if index >= torch.cuda.device_count():
            raise DeviceUnavailable(
                f"{name} was asked for, and torch sees {torch.cuda.device_count()} CUDA device(s)"
            )
        self.torch_device = torch.device("cuda", index)
        self.exclusive_key: str | None = device_uuid(index)
        self._nvml = Nvml(self.exclusive_key)
        before = self._nvml.read()
        torch.cuda.set_device(self.torch_device)
        self.check_health()
        self._foreign_at_start = before.used_bytes if before else None
        properties = torch.cuda.get_device_properties(index)
        self._properties = properties
        self.total_bytes = int(torch.cuda.mem_get_info(index)[1])
        own = self._own_bytes()
        self.free_bytes = min(int(torch.cuda.mem_get_info(index)[0]) + own, self.total_bytes)

    @property
    def capabilities(self) -> Capabilities:
        """What the GPU does natively."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return Capabilities(
            device_type="cuda",
            bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
            float16=major >= 7,
            tf32=major >= 8,
            compute_capability=(major, minor),
        )

    @property
    def environment(self) -> Environment:
        """GPU, driver and versions."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return Environment(
            device=str(self.torch_device),
            gpu=self._properties.name,
            capability=f"{major}.{minor}",
            total_bytes=self.total_bytes,
            driver=self._nvml.driver(),
            cuda=torch.version.cuda,
            torch=torch.__version__,
            python=platform.python_version(),
        )

    def limit(self, vram_budget_bytes: int) -> None:
        """Cap the caching allocator at what the budget leaves beside the non-torch bytes."""
        allowed = max(vram_budget_bytes - self.read().non_torch_bytes, 0)
        fraction = min(allowed / self.total_bytes, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """The caching allocator accounts by itself."""
        yield

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the GPU."""
        return tensor.to(self.torch_device, non_blocking=True)

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model on the GPU."""
        return model.to(self.torch_device)

    def mark(self) -> CudaMark:
        """An event on the current stream."""
        return CudaMark()

    def synchronize(self) -> None:
        """Wait for all work on the GPU."""
        torch.cuda.synchronize(self.torch_device)

    def read(self) -> MemoryReading:
        """The caching allocator's statistics, and what the process holds beside it."""
        statistics = torch.cuda.memory_stats(self.torch_device)
        reserved = int(statistics.get("reserved_bytes.all.current", 0))
        return MemoryReading(
            allocated_bytes=int(statistics.get("allocated_bytes.all.current", 0)),
            reserved_bytes=reserved,
            peak_allocated_bytes=int(statistics.get("allocated_bytes.all.peak", 0)),
            peak_reserved_bytes=int(statistics.get("reserved_bytes.all.peak", 0)),
            non_torch_bytes=max(self._own_bytes() - reserved, 0),
            allocator_retries=int(statistics.get("num_alloc_retries", 0)),
        )

    def allocated_bytes(self) -> int:
        """Bytes in live tensors; unlike `read` it asks the allocator alone."""
        return int(torch.cuda.memory_allocated(self.torch_device))

    def reset_peaks(self) -> None:
        """Start new peaks at what is held now."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release_cache(self) -> None:
        """Return cached segments to the driver."""
        torch.cuda.empty_cache()

    def check_health(self) -> None:
        """Sum a small tensor and synchronize."""
        total = torch.ones(1024, device=self.torch_device).sum()
        self.synchronize()
        if total.item() != 1024.0:
            raise DeviceUnavailable(f"{self.torch_device} added 1024 ones up to {total.item()}")

    def foreign_bytes(self) -> int | None:
        """What other processes hold on the GPU now."""
        reading = self._nvml.read()
        own = self._nvml.process_bytes(os.getpid())
        return None if reading is None or own is None else max(reading.used_bytes - own, 0)

    def _own_bytes(self) -> int:
        """What this process holds on the GPU.

        NVML's own count where it gives one; else the growth since before the context; else, where
        NVML refuses altogether, everything in use, which errs on the safe side.
        """
        listed = self._nvml.process_bytes(os.getpid())
        if listed is not None:
            return listed
        free, total = torch.cuda.mem_get_info(self.torch_device)
        reading = self._nvml.read()
        if reading is None or self._foreign_at_start is None:
            return int(total - free)
        return max(reading.used_bytes - self._foreign_at_start, 0)


class CudaMark:
    """A CUDA event with a time."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        self._event.record()

    def seconds_since(self, earlier: CudaMark) -> float:
        """Seconds between two events, once the device has passed both."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3
