"""What may be asked of a device: a name and a VRAM budget. Imports no torch, to refuse quickly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidArgument
from autofit.units import MAX_BYTES, check_size, format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch


def budget_bytes(
    vram_budget: str | float | None, *, total_bytes: int, free_bytes: int, is_cpu: bool = False
) -> int:
    """Return a VRAM budget in bytes.

    Args:
        vram_budget: "24GiB", bytes as an integer, a fraction of the device in (0, 1], or None: the
            free memory less 3%, but at least 256 MiB and at most a tenth.
        total_bytes: the device's memory.
        free_bytes: what this process could use of it now.
        is_cpu: whether the device is the CPU, which is also what runs where there is no GPU.

    Raises:
        InvalidArgument: it cannot be read, is below 1 MiB, or is larger than the device.
    """
    if vram_budget is None:
        return free_bytes - min(max(int(0.03 * free_bytes), 256 * 2**20), free_bytes // 10)
    budget = _read_budget(vram_budget, total_bytes)
    if budget > total_bytes:
        device = "CPU" if is_cpu else "device"
        way_out = '. Without a GPU, pass device="cpu" and a smaller vram_budget' * is_cpu
        raise InvalidArgument(
            f"a VRAM budget of {format_bytes(budget)} is more than the {device} has "
            f"({format_bytes(total_bytes)}){way_out}"
        )
    return budget


def check_budget(vram_budget: str | float | None) -> None:
    """Refuse a value that is not a budget on any device.

    Raises:
        InvalidArgument: it cannot be read, is below 1 MiB, or is a fraction outside (0, 1].
    """
    if vram_budget is not None:
        _read_budget(vram_budget, total_bytes=MAX_BYTES // 2)  # a device with room


def _read_budget(vram_budget: str | float, total_bytes: int) -> int:
    if isinstance(vram_budget, str):
        return check_size(parse_bytes(vram_budget), vram_budget)
    if isinstance(vram_budget, bool) or not isinstance(vram_budget, (int, float)):
        raise InvalidArgument(
            'vram_budget must be a size such as "24GiB", a number of bytes, or a '
            f"fraction, got {vram_budget!r}"
        )
    if isinstance(vram_budget, float):
        if not 0 < vram_budget <= 1:
            raise InvalidArgument(
                f"a VRAM budget given as a fraction must be in (0, 1], got {vram_budget}"
            )
        return check_size(int(vram_budget * total_bytes), vram_budget)
    if vram_budget <= 0:
        raise InvalidArgument(
            f"a VRAM budget must be a positive number of bytes, got {vram_budget}"
        )
    return check_size(vram_budget, vram_budget)


def device_names(device: Any) -> list[str | None]:
    """Return the devices that are meant: one, or several of which each runs plans of its own.

    Args:
        device: a name; several, as a sequence or divided by commas; "all" GPUs; None: see `Target`.

    Raises:
        InvalidArgument: there is no such kind of device, a GPU is named twice or without its number
            beside others, or CPU and GPU are mixed.
    """
    if device == "all":
        from torch.cuda import device_count

        device = [f"cuda:{index}" for index in range(device_count())]
    if isinstance(device, str):
        device = device.split(",")
    devices = device if isinstance(device, Sequence) else [device]  # None, or a torch.device
    for name in devices:
        check_device_name(name)
    names = [None if name is None else str(name) for name in devices]
    if not names:
        raise InvalidArgument(
            "device is empty: pass one such as cpu, or all for every GPU that torch sees"
        )
    if len(names) > 1:
        _check_several(names)
    return names


def _check_several(names: Sequence[str | None]) -> None:
    """Refuse devices that are named twice, or that cannot be compared."""
    if all(name == "cpu" for name in names):
        return
    unnumbered = [name for name in names if name is None or not name.startswith("cuda:")]
    if unnumbered:
        raise InvalidArgument(
            "several devices must be numbered GPUs, such as cuda:0,cuda:1, or all "
            f"cpu; got {', '.join(map(str, names))}"
        )
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise InvalidArgument(f"device lists {twice[0]} twice")


def check_device_name(name: object) -> None:
    """Refuse a name that is not a device's on any machine.

    Raises:
        InvalidArgument: there is no such kind of device.
    """
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise InvalidArgument(f'device must be "cuda", "cuda:N" or "cpu", got {name!r}')


def device_meant(name: str | torch.device | None, model: torch.nn.Module | None) -> str | None:
    """Return `name` with the index that it has in the caller's process.

    Without an index: a live model's GPU, else the current device of this process; if it has no CUDA
    context yet, `name` as it is, and none is created to find out.
    """
    import torch

    check_device_name(name)
    text = None if name is None else str(name)
    if text not in (None, "cuda"):
        return text
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is not None:
        return str(device)
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
    return f"cuda:{torch.cuda.current_device()}" if is_used else text
