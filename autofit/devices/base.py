"""The protocol of devices: hold a training to a VRAM budget, and report memory and time."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autofit.strategy import Capabilities

TRIED_TORCH = ("2.11", "2.13", "2.14", "2.15")
"""Versions of torch with which the tests that need no GPU were run.

With 2.13 all of them pass; with 2.11, built for CUDA, those of a GPU, which is emulated, do.
With 2.14.1, 2,492 passed, with 2.15.0, 2,451; 2 and 9 failed, for three
reasons, and passed when they were mended and run again.
"""


@dataclass(frozen=True)
class MemoryReading:
    """The memory counters of a process on a device; peaks are those since `reset_peaks`."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    non_torch_bytes: int
    allocator_retries: int


@dataclass(frozen=True)
class Environment:
    """Device and software of a search; the keys of the report's "environment"."""

    device: str
    gpu: str | None
    capability: str | None
    total_bytes: int
    driver: str | None = None
    cuda: str | None = None
    torch: str = torch.__version__
    python: str = platform.python_version()


class Device(Protocol):
    """One device, used by this process."""

    @property
    def torch_device(self) -> torch.device:
        """The device in torch."""

    @property
    def capabilities(self) -> Capabilities:
        """The native features of the hardware."""

    @property
    def environment(self) -> Environment:
        """The environment for a report."""

    @property
    def exclusive_key(self) -> str | None:
        """A name, unique on this host, that two searches must not use at once; None: shareable."""

    @property
    def total_bytes(self) -> int:
        """Bytes of memory on the device."""

    @property
    def free_bytes(self) -> int:
        """Bytes that this process could use when the device was opened."""

    @property
    def tracked_steps(self) -> int:
        """Steps beyond the warm-up that must run under `accounting` for peaks to be known."""

    def limit(self, vram_budget_bytes: int) -> None:
        """From now on, run out of memory where reserved and non-torch bytes exceed the budget."""

    def accounting(self) -> AbstractContextManager[None]:
        """Count what is allocated inside against the budget."""

    def in_host_memory(self) -> AbstractContextManager[None]:
        """Have what is made inside lie in the host's memory: it does not count."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device, in storage that counts against the budget."""

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a sample batch in the host memory that a data loader should fill."""

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the parameters and buffers of a module to the device, and return that module."""

    def mark(self) -> Any:
        """Return the moment at which the work queued so far ends."""

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """Return the seconds from one mark to a later one; only after `synchronize`."""

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def read(self) -> MemoryReading:
        """Return the memory counters."""

    def allocated_bytes(self) -> int:
        """Return bytes in live tensors; cheap enough to call after every step."""

    def reset_peaks(self) -> None:
        """Restart the peaks at the current values."""

    def release_cache(self) -> None:
        """Return unused cached memory to the device."""

    def check_health(self) -> None:
        """Compute something small and check it; raise what the device raises if it is gone."""

    def foreign_bytes(self) -> int | None:
        """Return the bytes that other processes use on the device; None: unknown."""

    def busy_percent(self) -> int | None:
        """Return the share of the last second or less in which the device computed, in percent.

        None: unknown.
        """

    def busy(self) -> str | None:
        """Return what others do on the device while this process does nothing; None: not much."""

    def close(self) -> None:
        """Restore the device and this process's use of it; it is not used afterwards."""
