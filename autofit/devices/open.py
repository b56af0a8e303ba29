"""From a device's name to the device."""

from __future__ import annotations

import re

import torch

from autofit.devices.base import Device
from autofit.devices.cpu import CpuDevice
from autofit.devices.cuda import CudaDevice
from autofit.errors import InvalidRequest


def open_device(name: str | torch.device | None, *, owns_process: bool | None = None) -> Device:
    """The device of that name, held by this process from now on.

    Args:
        name: "cuda", "cuda:1" or "cpu"; None: cuda where there is one.
        owns_process: see `CudaDevice`.

    Raises:
        InvalidRequest: no such kind of device.
        DeviceUnavailable: it is not there.
    """
    check_device_name(name)
    chosen = str(name) if name is not None else "cuda" if torch.cuda.is_available() else "cpu"
    return CpuDevice() if chosen == "cpu" else CudaDevice(chosen, owns_process=owns_process)


def device_meant(name: str | torch.device | None, model: torch.nn.Module | None) -> str | None:
    """`name` with the index that the caller's process means by it.

    Where none is said, a live model's GPU, else the one that this process computes on; where it
    computes on none, `name` as it is, and no CUDA context is created to find out.
    """
    check_device_name(name)
    said = None if name is None else str(name)
    if said not in (None, "cuda"):
        return said
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    found = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if found is not None:
        return str(found)
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
    return f"cuda:{torch.cuda.current_device()}" if is_used else said


def check_device_name(name: str | torch.device | None) -> None:
    """Refuse what names no device anywhere.

    Raises:
        InvalidRequest: no such kind of device.
    """
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise InvalidRequest(f'device must be "cuda", "cuda:N" or "cpu", got {name!r}')
