"""An NVIDIA GPU: the budget is enforced by torch's own allocator, memory is read through NVML.

`CudaDevice` creates a CUDA context, and belongs in the worker; what may be asked without one is in
`autofit.devices.nvml`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autofit.devices.base import Environment, MemoryReading
from autofit.devices.nvml import CONTEXT_BYTES, Nvml, Share, device_uuid, who_grew
from autofit.errors import DeviceUnavailable
from autofit.strategy import Capabilities

_KNOCK_BYTES = 32 * 2**20


class CudaDevice:
    """A GPU held by this process; making one creates the CUDA context.

    Args:
        name: "cuda:1"; without an index the one that this process computes on.
        owns_process: nobody else computes in this process, so whatever it caches may be let go;
            None: so it is where there is no context yet.

    Raises:
        DeviceUnavailable: there is no CUDA device, or not that one, or it does not answer.
        torch.OutOfMemoryError, torch.AcceleratorError: it is too full for a context.
    """

    tracked_steps = 0

    def __init__(self, name: str = "cuda", *, owns_process: bool | None = None) -> None:
        if not torch.cuda.is_available():
            raise DeviceUnavailable(
                f"{name} was asked for, and torch finds no CUDA device here: "
                'give device="cpu", or see that driver and torch build agree'
            )
        self._makes_context = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
        self._owns_process = self._makes_context if owns_process is None else owns_process
        self._current_before = 0 if self._makes_context else torch.cuda.current_device()
        index = torch.device(name).index
        index = self._current_before if index is None else index
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
        self._fraction_before = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        self._properties = torch.cuda.get_device_properties(index)
        outside = self._used_bytes() - self._reserved_bytes()
        others = before.used_bytes if before and self._makes_context else 0
        self._share = Share(context_bytes=outside - others, outside_bytes=outside)
        self._listed_as = self._find_itself()
        free, self.total_bytes = map(int, torch.cuda.mem_get_info(index))
        self.free_bytes = min(free + self._own_bytes(), self.total_bytes)

    def close(self) -> None:
        """Give back cached memory, the cap and the current device as they were found."""
        try:
            self.release_cache()
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self.torch_device)
        finally:
            torch.cuda.set_device(self._current_before)

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
        # Which of the two the fraction is of differs between versions of torch.
        whole = max(self.total_bytes, int(self._properties.total_memory))
        fraction = min(allowed / whole, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """The caching allocator accounts by itself."""
        yield

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the GPU."""
        return tensor.to(self.torch_device, non_blocking=True)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory, as `DataLoader(pin_memory=True)` hands it over.

        A copy from any other memory holds up the host, and precision or layout seem to gain less.
        """
        if tensor.device.type != "cpu":
            return tensor
        try:
            return tensor.pin_memory()
        except RuntimeError:  # there is not so much of it, or the layout cannot be pinned
            return tensor

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
        """Return cached segments to the driver, and cuBLAS's workspaces (32 MiB each on sm_90).

        A graph that the caller captured may hold on to the workspaces of its process; they stay.
        """
        if self._owns_process:
            torch._C._cuda_clearCublasWorkspaces()  # nothing public frees what the allocator lent
        torch.cuda.empty_cache()

    def check_health(self) -> None:
        """Sum a small tensor and synchronize."""
        total = torch.ones(1024, device=self.torch_device).sum()
        self.synchronize()
        if total.item() != 1024.0:
            raise DeviceUnavailable(f"{self.torch_device} added 1024 ones up to {total.item()}")

    def foreign_bytes(self) -> int | None:
        """What other processes hold on the GPU now, as far as it can be told from our own."""
        return max(self._used_bytes() - self._own_bytes(), 0)

    def _own_bytes(self) -> int:
        """What this process holds: NVML's own count, or else what `Share` makes of it."""
        listed = self._nvml.bytes_by_process() if self._listed_as is not None else None
        if listed and self._listed_as in listed:
            return listed[self._listed_as]
        reserved = self._reserved_bytes()
        return reserved + self._share.of(self._used_bytes() - reserved)

    def _used_bytes(self) -> int:
        """What all processes hold."""
        reading = self._nvml.read()
        if reading is not None:
            return reading.used_bytes
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total - free)

    def _reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.torch_device))

    def _find_itself(self) -> int | None:
        """The process id that NVML knows this process by: in a container it may be the host's.

        It is the one that grows as this process allocates, and that holds no more beside it than a
        context may take: a container can show all that run in it as one. None: it is not listed.
        """
        before = self._nvml.bytes_by_process()
        if not before:
            return None
        reserved = self._reserved_bytes()
        try:
            knock = torch.empty(_KNOCK_BYTES, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError:
            return None
        after = self._nvml.bytes_by_process() or {}
        grown = self._reserved_bytes() - reserved
        found = who_grew(before, after, grown) if grown else os.getpid()
        beside = after.get(found, 0) - self._reserved_bytes() if found is not None else 0
        del knock
        self.release_cache()
        return found if found in after and 0 <= beside <= CONTEXT_BYTES else None


class CudaMark:
    """A CUDA event with a time."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        self._event.record()

    def seconds_since(self, earlier: CudaMark) -> float:
        """Seconds between two events, once the device has passed both."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3
