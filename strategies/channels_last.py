"""Convolutions that take channels-last inputs, and return channels-last outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from autofit.strategy import TrainingView

from .compile import is_compiled
from .default_layout import DefaultLayout, in_order

_SETTING = "memory_format.layout=channels_last"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)


def has_default(model: nn.Module) -> bool:
    """Return whether weights of 2-d or 3-d convolutions lie in the default order."""
    return any(
        _is_default(weight)
        for module in _convolutions(model)
        # parameters(), not .weight: a parametrized weight is made of parameters further down
        for weight in module.parameters()
        if not nn.parameter.is_lazy(weight) and weight.dim() in _FORMATS
    )


def _convolutions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]


def _is_default(weight: nn.Parameter) -> bool:
    is_last = weight.is_contiguous(memory_format=_FORMATS[weight.dim()])
    return weight.is_contiguous() and not is_last


@contextmanager
def channels_last(training: TrainingView) -> Iterator[None]:
    """Give the convolutions of a training's model channels-last inputs while this is entered.

    Raises (the first forward with gradients):
        Unsupported: a write in place would be lost, or would reach more, than in the default order.
    """
    looked: set[bool] = set()

    def look() -> AbstractContextManager[Any]:
        """Look at the first forward that trains, in the model's training mode and in the other.

        A prediction has no values to write. What is compiled would be compiled once more for this.
        """
        model = training.model
        if torch.compiler.is_compiling() or model.training in looked or not torch.is_grad_enabled():
            return nullcontext()
        if training.device.type == "meta" or any(map(_runs_compiled, model.modules())):
            looked.update((True, False))
            return nullcontext()
        return one_look()

    @contextmanager
    def one_look() -> Iterator[None]:
        with DefaultLayout(_SETTING):
            yield
        looked.add(training.model.training)

    with ExitStack() as stack:
        for module in _convolutions(training.model):
            stack.callback(module.register_forward_pre_hook(_rearrange, with_kwargs=True).remove)
        stack.callback(training.wrap_forward(look, also_recomputation=False))
        yield


def _runs_compiled(module: nn.Module) -> bool:
    return is_compiled(module) or hasattr(module.forward, "_torchdynamo_orig_callable")


def _rearrange(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a convolution's arguments with its batch of images in channels-last order."""
    dims = 2 + len(module.kernel_size)
    if args:
        return (_rearranged(args[0], dims), *args[1:]), kwargs
    return args, {name: _rearranged(value, dims) for name, value in kwargs.items()}


def _rearranged(value: Any, dims: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == dims:  # no image without a batch
        return in_order(value, _FORMATS[dims])
    return value
