"""The meta device as a device to train on: it has a GPU's memory and no values."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autofit.devices.base import Environment, MemoryReading
from autofit.prediction.cuda.known_values import is_number
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.gpus import Gpu
from autofit.strategy import Capabilities


class MetaDevice:
    """Stands for a GPU while a training is rehearsed; implements `autofit.devices.base.Device`.

    Args:
        gpu: which one.
        tracer: who counts what is on it.
    """

    tracked_steps = 0
    exclusive_key: str | None = None

    def __init__(self, gpu: Gpu, tracer: CudaTracer) -> None:
        self.torch_device = torch.device("meta")
        self.total_bytes = self.free_bytes = gpu.total_bytes
        self._gpu, self._tracer = gpu, tracer

    @property
    def capabilities(self) -> Capabilities:
        """What the GPU does natively."""
        return Capabilities(
            device_type="meta",
            bfloat16=self._gpu.native_bfloat16,
            float16=self._gpu.capability >= (7, 0),
            tf32=self._gpu.tf32,
            compute_capability=self._gpu.capability,
        )

    @property
    def environment(self) -> Environment:
        """The GPU that is stood for, and versions."""
        major, minor = self._gpu.capability
        return Environment(
            device="meta",
            gpu=self._gpu.name,
            capability=f"{major}.{minor}",
            total_bytes=self.total_bytes,
            driver=None,
            cuda=None,
            torch=torch.__version__,
            python=platform.python_version(),
        )

    def limit(self, vram_budget_bytes: int) -> None:
        """A rehearsal runs without a limit; replays of it have one."""

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Operators inside count."""
        with self._tracer:
            yield

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of that shape which counts; one that counts already is on the device."""
        if self._tracer.number_of(tensor) is not None:
            return tensor
        placed = torch.empty_like(tensor.detach(), device=self.torch_device)
        if is_number(tensor):
            self._tracer.known.learn(placed, self._tracer.known.of(tensor))
        return placed.requires_grad_(tensor.requires_grad)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: no values are copied."""
        return tensor

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The same module with its parameters and buffers on the device."""
        model._apply(self.place)  # type: ignore[no-untyped-call]  # torch: what .to(device) is made of
        return model

    def mark(self) -> MetaMark:
        """A rehearsal takes no time."""
        return MetaMark()

    def synchronize(self) -> None:
        """Nothing runs."""

    def read(self) -> MemoryReading:
        """What the simulated allocator holds."""
        allocator = self._tracer.allocator
        return MemoryReading(
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            non_torch_bytes=self._gpu.context_bytes,
            allocator_retries=allocator.retries,
        )

    def allocated_bytes(self) -> int:
        """Bytes in live tensors."""
        return self._tracer.allocator.allocated_bytes

    def reset_peaks(self) -> None:
        """Start new peaks at what is held now."""
        self._tracer.allocator.reset_peaks()

    def release_cache(self) -> None:
        """Drop cached segments."""
        self._tracer.allocator.empty_cache()

    def check_health(self) -> None:
        """There is nothing to break."""

    def foreign_bytes(self) -> int | None:
        """Nobody else is on it."""
        return 0

    def close(self) -> None:
        """There is nothing to give back."""


class MetaMark:
    """A moment of a device on which everything takes no time."""

    def seconds_since(self, earlier: MetaMark) -> float:
        """Zero."""
        return 0.0
