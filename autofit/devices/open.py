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
    chosen = str(name) if name is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if chosen == "cpu":
        return CpuDevice()
    if re.fullmatch(r"cuda(:\d+)?", chosen):
        return CudaDevice(chosen)
    raise InvalidRequest(f'device must be "cuda", "cuda:N" or "cpu", got {chosen!r}')
