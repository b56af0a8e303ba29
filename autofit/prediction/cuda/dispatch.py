"""Where the emulation hooks into PyTorch: a dispatch key of its own, above autograd.

What CUDA does before autograd sees an operator (autocast's casts, the choice of an attention
kernel, an RNN as one cuDNN call) has no counterpart for meta tensors. It is emulated by Python
kernels that stand at the very place where CUDA's stand: at an autocast key. The key of a device
that no build of PyTorch has kernels for is used, so these kernels can be registered once and for
all; they act only inside `emulation`, on that thread, and also in the backward pass and in a
checkpoint's recomputation, since autograd carries dispatch keys along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from autofit.prediction.gpus import Gpu

_UNUSED = {"AutocastIPU": "ipu", "AutocastHPU": "hpu"}
_KEY_NAME = next(name for name in _UNUSED if hasattr(torch._C.DispatchKey, name))
_DEVICE = _UNUSED[_KEY_NAME]
_gpu: ContextVar[Gpu] = ContextVar("_gpu")
_KEY: Any = getattr(torch._C.DispatchKey, _KEY_NAME)

_library: Any = torch.library  # torch does not annotate it
_every_operator = _library.Library("_", "IMPL")
_every_operator.fallback(_library.fallthrough_kernel, _KEY_NAME)
_aten = _library.Library("aten", "IMPL")


def emulate(name: str, kernel: Callable[..., Any]) -> None:
    """Have `kernel` called in place of the aten operator `name` inside `emulation`.

    The kernel calls operators of its own inside `beneath()`, or they would come back to it.
    """
    _aten.impl(name, kernel, _KEY_NAME)


def beneath() -> AbstractContextManager[None]:
    """Inside it, operators are run as they are, without emulation."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(_KEY)
    )
    return guard


def emulated_gpu() -> Gpu:
    """The GPU that `emulation` was entered with."""
    return _gpu.get()


@contextmanager
def emulation(gpu: Gpu) -> Iterator[None]:
    """Let the registered kernels act on this thread, as they would on that GPU."""
    before = torch.is_autocast_enabled(_DEVICE)
    torch.set_autocast_enabled(_DEVICE, True)  # the key is masked out otherwise
    token = _gpu.set(gpu)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        _gpu.reset(token)
        torch.set_autocast_enabled(_DEVICE, before)
