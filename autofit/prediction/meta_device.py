"""The meta device as a device to train on: it has a GPU's memory and no values."""

from __future__ import annotations

import torch

from autofit.devices.base import Environment
from autofit.devices.cpu import TracedDevice
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.cuda.values import is_number
from autofit.prediction.gpus import Gpu
from autofit.strategy import Capabilities


class MetaDevice(TracedDevice):
    """Stands for a GPU in a dry run; implements `autofit.devices.base.Device`.

    Args:
        gpu: the GPU.
        tracer: counts what is allocated on it.
    """

    tracked_steps = 0

    def __init__(self, gpu: Gpu, tracer: CudaTracer) -> None:
        super().__init__(tracer, non_torch_bytes=gpu.context_bytes)
        self.torch_device = torch.device("meta")
        self.total_bytes = self.free_bytes = gpu.total_bytes
        self._gpu, self._known = gpu, tracer.known

    @property
    def capabilities(self) -> Capabilities:
        """The native features of the GPU."""
        return Capabilities(
            device_type="meta",
            bfloat16=self._gpu.native_bfloat16,
            float16=self._gpu.capability >= (7, 0),
            tf32=self._gpu.tf32,
            compute_capability=self._gpu.capability,
        )

    @property
    def environment(self) -> Environment:
        """The GPU, and versions."""
        major, minor = self._gpu.capability
        return Environment("meta", self._gpu.name, f"{major}.{minor}", self.total_bytes)

    def limit(self, vram_budget_bytes: int) -> None:
        """Do nothing: a dry run has no limit, replays of it have one."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of that shape which counts; the tensor itself if it counts already."""
        if self._tracer.number_of(tensor) is not None:
            return tensor
        placed = torch.empty_like(tensor.detach(), device=self.torch_device)
        if is_number(tensor):
            self._known.learn(placed, self._known.of(tensor))
        return placed.requires_grad_(tensor.requires_grad)

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the parameters and buffers of a module to the device, and return that module."""
        model._apply(self.place)  # type: ignore[no-untyped-call]  # torch: what .to(device) is made of
        return model

    def check_health(self) -> None:
        """Do nothing: there is no device that could fail."""
