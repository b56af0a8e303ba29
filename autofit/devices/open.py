"""From a device's name to the device."""

from __future__ import annotations

import re

import torch

from autofit.devices.base import Device
from autofit.devices.cpu import CpuDevice
from autofit.devices.cuda import CudaDevice
from autofit.errors import InvalidRequest


def open_device(name: str | torch.device | None) -> Device:
    """The device of that name, held by this process from now on.

    Args:
        name: "cuda", "cuda:1" or "cpu"; None: cuda where there is one.

    Raises:
        InvalidRequest: no such kind of device.
        DeviceUnavailable: it is not there.
    """
    check_device_name(name)
    chosen = str(name) if name is not None else "cuda" if torch.cuda.is_available() else "cpu"
    return CpuDevice() if chosen == "cpu" else CudaDevice(chosen)


def check_device_name(name: str | torch.device | None) -> None:
    """Refuse what names no device anywhere.

    Raises:
        InvalidRequest: no such kind of device.
    """
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise InvalidRequest(f'device must be "cuda", "cuda:N" or "cpu", got {name!r}')
