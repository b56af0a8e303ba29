"""What every device promises: to hold a training within a VRAM budget, and to say what it held."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autofit.errors import InvalidRequest
from autofit.strategy import Capabilities
from autofit.units import check_size, format_bytes, parse_bytes


@dataclass(frozen=True)
class MemoryReading:
    """The device's memory as the process sees it now; peaks since `reset_peaks`."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    non_torch_bytes: int
    allocator_retries: int


@dataclass(frozen=True)
class Environment:
    """Where a search ran; the keys of the report's "environment"."""

    device: str
    gpu: str | None
    capability: str | None
    total_bytes: int
    driver: str | None
    cuda: str | None
    torch: str
    python: str


class Mark(Protocol):
    """A point in a device's time."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds from an earlier mark to this one; only after `Device.synchronize`."""


class Device(Protocol):
    """One device, held by this process."""

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do natively."""

    @property
    def environment(self) -> Environment:
        """What a report says of it, and of the software on it."""

    @property
    def exclusive_key(self) -> str | None:
        """A name on this host of what two searches must not use at once; None: it may be shared."""

    @property
    def total_bytes(self) -> int:
        """All of its memory, whoever uses it."""

    @property
    def free_bytes(self) -> int:
        """What this process could have held when the device was opened."""

    @property
    def tracked_steps(self) -> int:
        """Steps beyond the warm-up that must run under `accounting` for peaks to be known."""

    def limit(self, vram_budget_bytes: int) -> None:
        """From now on, run out of memory where allocator and non-torch bytes exceed this."""

    def accounting(self) -> AbstractContextManager[None]:
        """Inside it, what is born on the device counts against the budget."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values on the device, in storage that the device accounts for."""

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of a sample batch in the host memory that a data loader should fill."""

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The same module object, its parameters and buffers moved to the device."""

    def mark(self) -> Mark:
        """The point in the device's time that the work given to it so far ends at."""

    def synchronize(self) -> None:
        """Wait for all work given to it."""

    def read(self) -> MemoryReading:
        """Its memory counters now; peaks are those since `reset_peaks`."""

    def allocated_bytes(self) -> int:
        """Bytes in live tensors now; cheap enough to ask for after every step."""

    def reset_peaks(self) -> None:
        """Start counting peaks anew, from what is held now."""

    def release_cache(self) -> None:
        """Hand unused cached memory back to the device."""

    def check_health(self) -> None:
        """Compute something small and look at it; raises what the device raises if it is gone."""

    def foreign_bytes(self) -> int | None:
        """What other processes hold on the device; None: cannot be told."""

    def close(self) -> None:
        """Leave it, and this process's use of it, as they were found; it is not used after that."""


def budget_bytes(vram_budget: str | float | None, *, total_bytes: int, free_bytes: int) -> int:
    """The VRAM budget in bytes.

    Args:
        vram_budget: "24GiB", bytes as a whole number, a fraction of the device in (0, 1], or None:
            what is free, less a margin of 3 % and at least 256 MiB (at most a tenth of it).
        total_bytes: the device's memory.
        free_bytes: what this process could hold of it now.

    Raises:
        InvalidRequest: it cannot be read, is not at least 1 MiB, or is larger than the device.
    """
    if vram_budget is None:
        return free_bytes - min(max(int(0.03 * free_bytes), 256 * 2**20), free_bytes // 10)
    budget = _read_budget(vram_budget, total_bytes)
    if budget > total_bytes:
        raise InvalidRequest(
            f"a VRAM budget of {format_bytes(budget)} is larger than the device, "
            f"which has {format_bytes(total_bytes)}"
        )
    return budget


def check_budget(vram_budget: str | float | None) -> None:
    """Refuse what is no budget on whatever device.

    Raises:
        InvalidRequest: it cannot be read, is not at least 1 MiB, or is no fraction.
    """
    if vram_budget is not None:
        _read_budget(vram_budget, total_bytes=sys.maxsize)


def _read_budget(vram_budget: str | float, total_bytes: int) -> int:
    if isinstance(vram_budget, str):
        return check_size(parse_bytes(vram_budget), vram_budget)
    if isinstance(vram_budget, bool) or not isinstance(vram_budget, (int, float)):
        raise InvalidRequest(
            f'vram_budget must be like "24GiB", bytes or a fraction: {vram_budget!r}'
        )
    if isinstance(vram_budget, float):
        if not 0 < vram_budget <= 1:
            raise InvalidRequest(
                f"a VRAM budget as a fraction must be in (0, 1], got {vram_budget}"
            )
        return check_size(int(vram_budget * total_bytes), vram_budget)
    if vram_budget <= 0:
        raise InvalidRequest(f"a VRAM budget must be above zero bytes, got {vram_budget}")
    return check_size(vram_budget, vram_budget)
