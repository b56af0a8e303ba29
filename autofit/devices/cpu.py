"""Real computation on the CPU against a VRAM budget, as a GPU would enforce it.

Tensors made under `accounting` pass a tracer into the simulated CUDA caching allocator, which
raises `torch.OutOfMemoryError` where the budget ends, so that a whole search runs for real on a
machine without a GPU. Tracked steps give peaks, retries and growth; timed steps run untracked, at
the CPU's own speed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from autofit.devices.base import Device, Environment, MemoryReading, host_memory, load_of_others
from autofit.errors import DeviceUnavailable
from autofit.memory.allocator import CachingAllocator, expandable_segments
from autofit.memory.tracer import CompiledMemoryTracer
from autofit.strategy import Capabilities


class CpuDevice(Device):
    """The host's processor and memory, accounted for like a GPU's.

    Args:
        record: keep every allocation in `tracer.events`.

    Attributes:
        tracer: sees every tensor under `accounting`.
    """

    tracked_steps = 1

    def __init__(self, *, record: bool = False) -> None:
        self._allocator = CachingAllocator(expandable_segments=expandable_segments())
        self.tracer = CompiledMemoryTracer(self._allocator, device_type="cpu", record=record)
        self.torch_device = torch.device("cpu")
        self.total_bytes, self.free_bytes = host_memory()
        self.environment = Environment(
            "cpu", gpu=None, capability=None, total_bytes=self.total_bytes
        )

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Allocate what operators and compiled code create in the simulated allocator."""
        with self.tracer.accounting():
            yield

    @property
    def capabilities(self) -> Capabilities:
        """bfloat16 where the processor multiplies in it; the rest is for GPUs."""
        flags = Path("/proc/cpuinfo").read_text()
        return Capabilities("cpu", bfloat16="avx512_bf16" in flags or "amx_bf16" in flags)

    def limit(self, vram_budget_bytes: int) -> None:
        self._allocator.limit_bytes = vram_budget_bytes

    def in_host_memory(self) -> AbstractContextManager[None]:
        """Leave what is made inside out of the simulated allocator."""
        return self.tracer.untracked()

    def read(self) -> MemoryReading:
        return MemoryReading(
            allocated_bytes=self._allocator.allocated_bytes,
            reserved_bytes=self._allocator.reserved_bytes,
            peak_allocated_bytes=self._allocator.peak_allocated_bytes,
            peak_reserved_bytes=self._allocator.peak_reserved_bytes,
            non_torch_bytes=0,
            allocator_retries=self._allocator.retries,
        )

    def allocated_bytes(self) -> int:
        return self._allocator.allocated_bytes

    def reset_peaks(self) -> None:
        self._allocator.reset_peaks()

    def release_cache(self, *, workspaces: bool = True) -> None:
        self._allocator.empty_cache()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy: a transfer to the CPU that copies nothing would not be accounted for."""
        return tensor.clone()

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Replace the parameters and buffers of a module by copies, and return that module."""
        model._apply(lambda tensor: tensor.to("cpu", copy=True))  # type: ignore[no-untyped-call]  # torch: what .to(device) is made of
        return model

    def busy(self) -> str | None:
        return load_of_others()

    def check_health(self) -> None:
        total = float(torch.ones(1024, dtype=torch.float32, device="cpu").sum())
        if total != 1024.0:
            raise DeviceUnavailable(f"the CPU computed {total} as the sum of 1024 ones")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as in glibc's malloc.h
_MALLOC_VARIABLES = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}


def fix_malloc_thresholds(device: torch.device) -> None:
    """Have glibc keep freed memory until the process ends, for a training on the CPU.

    The thresholds from which it gives memory back follow what the process freed so far. So of two
    processes with one training, one may get from the kernel in each step what the other reuses, and
    be slower. Thresholds that were set never follow again: this cannot be undone. What the user's
    environment says of them stays, and without glibc nothing is set.

    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if device.type != "cpu" or mallopt is None or _MALLOC_VARIABLES & os.environ.keys():
        return
    if mallopt(_M_MMAP_THRESHOLD, 2**30) != 1:  # glibc 2.36 takes it, and returns 1
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the upper limit in mallopt(3), on 64 bits
    mallopt(_M_TRIM_THRESHOLD, 2**30)
