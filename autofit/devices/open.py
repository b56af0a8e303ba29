"""Open a device by its name."""

from __future__ import annotations

import torch

from autofit.devices.base import Device
from autofit.devices.cpu import CpuDevice
from autofit.devices.cuda import CudaDevice, why_none
from autofit.devices.request import check_device_name


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


def device_meant(name: str | torch.device | None, model: torch.nn.Module | None) -> str | None:
    """Return `name` with the index that it has in the caller's process.

    Without an index: a live model's GPU, else the current device of this process; if it has no CUDA
    context yet, `name` as it is, and none is created to find out.
    """
    check_device_name(name)
    given = None if name is None else str(name)
    if given not in (None, "cuda"):
        return given
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    found = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if found is not None:
        return str(found)
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
    return f"cuda:{torch.cuda.current_device()}" if is_used else given
