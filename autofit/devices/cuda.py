"""An NVIDIA GPU: torch's allocator enforces the budget, and memory is read through NVML.

`open_device` opens it, or the CPU, by name.

`CudaDevice` creates a CUDA context and belongs in the worker; `autofit.devices.nvml` needs none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from autofit.devices.base import Device, Environment, MemoryReading
from autofit.devices.cpu import CpuDevice
from autofit.devices.nvml import CONTEXT_BYTES, Nvml, ProcessMemory, device_uuid, process_that_grew
from autofit.devices.request import check_device_name
from autofit.errors import DeviceUnavailable
from autofit.strategy import Capabilities
from autofit.units import format_bytes

_IDENTIFYING_BYTES = 32 * 2**20
_BUSY = 10  # percent of the time
_CROWDED = 0.01  # share of the memory


_PEAKS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")
_COUNTS = ("num_alloc_retries",)
# The functions of torch._C that every public one calls to reset, and what they reset.
#
# Loops that log their memory call these after each step, which would hide a probe's peak.
_RESETS = {
    "_cuda_resetPeakMemoryStats": _PEAKS,
    "_accelerator_resetPeakStats": _PEAKS,
    "_cuda_resetAccumulatedMemoryStats": _COUNTS,
    "_accelerator_resetAccumulatedStats": _COUNTS,
}
# The variable that is other than "1" on an emulated GPU that computes no floating point.
_VALUES = "EMULATED_GPU_VALUES"
_NO_KERNEL = frozenset({98, 209, 222})  # invalid function, no kernel image, PTX that is too new
_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_OUT_OF_MEMORY = 2
_FULL_BYTES = 64 * 2**20  # with so little left, what runs out of memory may be the device


def why_none() -> str:
    """Return why torch finds no CUDA device: no CUDA build, no driver, one that is too old, ..."""
    text = "the driver reports no device"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch
    except Exception as error:  # it raises an AssertionError, a RuntimeError or one of its own
        text = str(error).strip()
    code = re.search(r"Error \d+: [^\n]+", text)
    return code[0] if code else re.split(r"\.\s+(?=[A-Z])", text, maxsplit=1)[0].rstrip(".")


class CudaDevice(Device):
    """A GPU; the constructor creates the CUDA context.

    Args:
        name: "cuda:1"; without an index the current device of this process.

    Raises:
        DeviceUnavailable: there is no CUDA device, or not that one, or it does not respond.
        torch.OutOfMemoryError, torch.AcceleratorError: there is no memory for a context.
    """

    def __init__(self, name: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise DeviceUnavailable(
                f"{name} was requested, but torch finds no CUDA device ({why_none()}): use "
                'device="cpu", or check that a GPU is visible and that the driver '
                "matches the torch build"
            )
        if _NO_CACHING in os.environ:  # torch asks whether it is set, to whatever
            raise DeviceUnavailable(
                f"{_NO_CACHING}={os.environ[_NO_CACHING]!r} disables torch's caching allocator, so "
                "memory cannot be counted or limited: unset it"
            )
        makes_context = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
        index = torch.device(name).index
        if index is None:
            index = 0 if makes_context else torch.cuda.current_device()
        if index >= torch.cuda.device_count():
            raise DeviceUnavailable(
                f"{name} was requested, but torch sees {torch.cuda.device_count()} CUDA device(s)"
            )
        self.torch_device = torch.device("cuda", index)
        self.exclusive_key = uuid = device_uuid(index)
        self._nvml = Nvml(uuid)
        before = self._nvml.used_bytes() or 0
        torch.cuda.set_device(self.torch_device)
        self._use_first()
        self._properties = torch.cuda.get_device_properties(index)
        outside = self._used_bytes() - self._reserved_bytes()
        others = before if makes_context else 0
        self._own = ProcessMemory(context_bytes=outside - others, outside_bytes=outside)
        self._listed_as = self._find_itself()
        free, self.total_bytes = map(int, torch.cuda.mem_get_info(index))
        self.free_bytes = min(free + self._own_bytes(), self.total_bytes)
        self._statistics = AllocatorStatistics(self.torch_device)
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        self.environment = Environment(
            device=str(self.torch_device),
            gpu=self._properties.name,
            capability=f"{major}.{minor}",
            total_bytes=self.total_bytes,
            driver=self._nvml.driver(),
            cuda=torch.version.cuda,
        )

    @property
    def capabilities(self) -> Capabilities:
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return Capabilities(
            device_type="cuda",
            bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
            float16=major >= 7,
            tf32=major >= 8,
            compute_capability=(major, minor),
        )

    def limit(self, vram_budget_bytes: int) -> None:
        """Cap the caching allocator at the budget less the non-torch bytes."""
        allowed = max(vram_budget_bytes - self.read().non_torch_bytes, 0)
        # Versions of torch differ in which of the two the fraction refers to.
        whole = max(self.total_bytes, int(self._properties.total_memory))
        fraction = min((allowed + 0.5) / whole, 1.0)  # so that rounding takes no byte of it
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in pinned memory, as `DataLoader(pin_memory=True)` does.

        Copies from other memory block the host, which would hide gains of precision or layout.
        """
        if tensor.device.type != "cpu":
            return tensor
        try:
            return tensor.pin_memory()
        except RuntimeError:  # too little pinned memory, or a layout that cannot be pinned
            return tensor

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        event.record()
        return event

    def seconds_between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return float(earlier.elapsed_time(later)) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def read(self) -> MemoryReading:
        statistics = self._statistics.read()
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
        """Return bytes in live tensors; unlike `read` without asking NVML."""
        return int(torch.cuda.memory_allocated(self.torch_device))

    def reset_peaks(self) -> None:
        self._statistics.restart_peaks()

    def release_cache(self, *, workspaces: bool = True) -> None:
        """Return cached segments to the driver, and cuBLAS's workspaces (32 MiB each on sm_90)."""
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()  # torch has no public function for it
        torch.cuda.empty_cache()

    def check_health(self) -> None:
        total = torch.ones(1024, device=self.torch_device).sum()
        self.synchronize()
        if total.item() != 1024.0 and os.environ.get(_VALUES, "1") == "1":
            raise DeviceUnavailable(
                f"{self.torch_device} computed {total.item()} as the sum of 1024 ones"
            )

    def _use_first(self) -> None:
        """Check the device's health, and explain a failure that no plan is to blame for."""
        try:
            self.check_health()
        except torch.AcceleratorError as error:
            code, device = getattr(error, "error_code", None), self.torch_device
            if code in _NO_KERNEL:
                major, minor = torch.cuda.get_device_capability(device)
                raise DeviceUnavailable(
                    f"{device} ({torch.cuda.get_device_name(device)}) has compute capability "
                    f"{major}.{minor}, but torch {torch.__version__} only has kernels for "
                    f"{', '.join(torch.cuda.get_arch_list())}: install a torch build that "
                    "supports it, or choose another device"
                ) from error
            if code != _OUT_OF_MEMORY:
                raise
            if (free := int(torch.cuda.mem_get_info(device)[0])) > _FULL_BYTES:
                raise DeviceUnavailable(
                    f"{self.torch_device} has {format_bytes(free)} free, but the driver cannot "
                    "allocate pinned host memory, which every copy to the host needs: free "
                    "host memory, or raise the limit of the container or of locked memory "
                    "(ulimit -l)"
                ) from error
            raise

    def foreign_bytes(self) -> int | None:
        return max(self._used_bytes() - self._own_bytes(), 0)

    def busy(self) -> str | None:
        percent, foreign_bytes = self._nvml.busy_percent() or 0, self.foreign_bytes() or 0
        parts = [f"other processes ran kernels for {percent}% of the time"] * (percent >= _BUSY)
        parts += [f"other processes hold {format_bytes(foreign_bytes)}"] * (
            foreign_bytes > _CROWDED * self.total_bytes
        )
        return " and ".join(parts) or None

    def _own_bytes(self) -> int:
        """Return the bytes of this process: as NVML lists them, or else by `ProcessMemory`."""
        listed = self._nvml.bytes_by_process() if self._listed_as is not None else None
        if listed and self._listed_as in listed:
            return listed[self._listed_as]
        reserved = self._reserved_bytes()
        return reserved + self._own.outside_allocator(self._used_bytes() - reserved)

    def _used_bytes(self) -> int:
        """Return the bytes of all processes."""
        used = self._nvml.used_bytes()
        if used is not None:
            return used
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total - free)

    def _reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.torch_device))

    def _find_itself(self) -> int | None:
        """Return the id under which NVML lists this process; None if it does not.

        In a container the id may be the host's. It is the process that grows as this one allocates
        and uses no more than a context outside the allocator: some containers list all of their
        processes as one.
        """
        before = self._nvml.bytes_by_process()
        if not before:
            return None
        reserved = self._reserved_bytes()
        try:
            block = torch.empty(_IDENTIFYING_BYTES, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError:
            return None
        after = self._nvml.bytes_by_process() or {}
        grown = self._reserved_bytes() - reserved
        process = process_that_grew(before, after, grown) if grown else os.getpid()
        outside = after.get(process, 0) - self._reserved_bytes() if process is not None else 0
        del block
        self.release_cache()
        return process if process in after and 0 <= outside <= CONTEXT_BYTES else None


class AllocatorStatistics:
    """Statistics of one device; what the process resets from now on is noted before.

    Args:
        device: a CUDA device that this process uses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted = dict.fromkeys((*_PEAKS, *_COUNTS), 0)
        for name, reset in _RESETS.items():
            if (function := getattr(torch._C, name, None)) is not None:
                setattr(torch._C, name, partial(self._note_and, function, reset))

    def read(self) -> Mapping[str, int]:
        """Return torch's, with peaks since `restart_peaks` and counts since the start."""
        read: dict[str, int] = torch.cuda.memory_stats(self._device)
        peaks = {name: max(read.get(name, 0), self._noted[name]) for name in _PEAKS}
        counts = {name: read.get(name, 0) + self._noted[name] for name in _COUNTS}
        return {**read, **peaks, **counts}

    def restart_peaks(self) -> None:
        """Restart the peaks at the current values."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._noted.update(dict.fromkeys(_PEAKS, 0))

    def _note_and(self, reset: Callable[..., Any], names: tuple[str, ...], *args: Any) -> Any:
        """Note what is about to be reset, on whatever device, and reset it."""
        before = self.read()
        result = reset(*args)
        now = torch.cuda.memory_stats(self._device)
        for name in names:
            self._noted[name] = before[name] - (now.get(name, 0) if name in _COUNTS else 0)
        return result


def open_device(name: str | torch.device | None) -> Device:
    """Return the device of that name.

    Args:
        name: "cuda", "cuda:1" or "cpu"; None: cuda if there is one.

    Raises:
        InvalidArgument: there is no such kind of device.
        DeviceUnavailable: there is no such device.
    """
    check_device_name(name)
    chosen = str(name) if name is not None else "cuda" if torch.cuda.is_available() else "cpu"
    return CpuDevice() if chosen == "cpu" else CudaDevice(chosen)


_NO_GPU = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "CUDA driver initialization failed",
    "No CUDA GPUs are available",
)


def notes_on_choice(name: str | torch.device | None) -> tuple[str, ...]:
    """Return a note where nobody named the CPU, and a GPU that is here cannot be used."""
    if name is not None or torch.cuda.is_available() or (why := why_none()).startswith(_NO_GPU):
        return ()
    return (f"this ran on the CPU, because torch cannot use this machine's GPU: {why}",)
