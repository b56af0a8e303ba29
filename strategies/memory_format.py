"""Channels-last convolutions.

`memory_format.layout` starts at "default". With "channels_last" each convolution is given its input
in that order, and returns its output so; what lies between convolutions keeps the order, so the
activations are rearranged once, where they enter. The weights stay as they are: whatever shares
their memory (an earlier `state_dict()`, detached aliases, weights tied by `.data`, optimizer state,
one flat storage for all) holds the same values as without it, during the training too. A kernel
that wants its weight channels-last copies it for the call, which is little beside the activations.

A model whose writes in place depend on the order is refused in the first forward: see
`default_layout`. One that is compiled is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from autofit.plan import Dimension
from autofit.strategy import COMPILED_CALL, Context, Numerics, Phase, TrainingView

from .default_layout import DefaultLayout, in_order
from .one_setting import OneSetting

SETTING = "memory_format.layout"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)


class MemoryFormat(OneSetting):
    """The order in which convolutions have their activations in memory."""

    name = "memory_format"
    setting = SETTING
    phase = Phase.MODEL
    numerics = Numerics.ROUNDING

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return two layouts where the model has 2-d or 3-d convolutions in the default one."""
        weights = [
            weight
            for module in _convolutions(context.model)
            # parameters(), not .weight: a parametrized weight is made of parameters further down
            for weight in module.parameters()
            if not nn.parameter.is_lazy(weight) and weight.dim() in _FORMATS
        ]
        others = ["channels_last"] if any(map(_is_default, weights)) else []
        return {SETTING: Dimension(["default", *others], lever=next(iter(others), None))}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Give the convolutions channels-last inputs."""
        return _channels_last(training)

    def lines(self, value: Any, payload: Any) -> list[str]:
        return [
            "import torch",
            "model = model.to(memory_format=torch.channels_last)  # _3d for 3-d convolutions",
        ]


def _convolutions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]


def _is_default(weight: nn.Parameter) -> bool:
    is_last = weight.is_contiguous(memory_format=_FORMATS[weight.dim()])
    return weight.is_contiguous() and not is_last


@contextmanager
def _channels_last(training: TrainingView) -> Iterator[None]:
    # A prediction has no values to write
    looks = [] if training.device.type == "meta" else [DefaultLayout(f"{SETTING}=channels_last")]

    def look() -> AbstractContextManager[Any]:
        """Look at the first forward; code that is compiled would be compiled again without it."""
        if not looks or torch.compiler.is_compiling():
            return nullcontext()
        if any(vars(each).get(COMPILED_CALL) for each in training.model.modules()):
            return nullcontext()
        return looks.pop()

    with ExitStack() as stack:
        for module in _convolutions(training.model):
            stack.callback(module.register_forward_pre_hook(_rearrange, with_kwargs=True).remove)
        stack.callback(training.wrap_forward(look, also_recomputation=False))
        yield


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
