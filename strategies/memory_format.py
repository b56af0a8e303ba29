"""Channels-last weights for convolutions.

`memory_format.layout` starts at "default". Only the weights change layout: a convolution with a
channels-last weight returns channels-last output for any input, so the activations follow. Each
weight is rearranged inside its own storage: no second copy is held, parameter identities and
storages stay, and undoing restores the former strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from autofit.plan import Dimension
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .one_setting import OneSetting

SETTING = "memory_format.layout"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)


class MemoryFormat(OneSetting):
    """The order in which convolution weights, and so activations, lie in memory."""

    name = "memory_format"
    setting = SETTING
    phase = Phase.MODEL
    numerics = Numerics.ROUNDING

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return two layouts where the model has 2-d or 3-d convolutions in the default one."""
        others = ["channels_last"] if _convolution_weights(context.model) else []
        return {SETTING: Dimension(["default", *others])}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Rearrange the convolution weights."""
        return _channels_last(training)

    def lines(self, value: Any, payload: Any) -> list[str]:
        return [
            "import torch",
            "model = model.to(memory_format=torch.channels_last)  # _3d for 3-d convolutions",
        ]


@contextmanager
def _channels_last(training: TrainingView) -> Iterator[None]:
    weights = _convolution_weights(training.model)
    strides_before = [weight.stride() for weight in weights]
    try:
        for weight in weights:
            wanted = torch.empty_like(
                weight, memory_format=_FORMATS[weight.dim()], device="meta"
            ).stride()
            _lay_out(training, weight, wanted)
        yield
    finally:
        for weight, strides in zip(weights, strides_before, strict=True):
            _lay_out(training, weight, strides)


def _convolution_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that fill a stretch of memory and are not yet channels-last."""
    weights: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            # parameters(), not .weight: a parametrized weight is made of parameters further down
            weights |= {id(p): p for p in module.parameters() if p.dim() in _FORMATS}
    return [
        weight
        for weight in weights.values()
        if not nn.parameter.is_lazy(weight)
        and weight.is_contiguous()
        and not weight.is_contiguous(memory_format=_FORMATS[weight.dim()])
    ]


def _lay_out(training: TrainingView, weight: nn.Parameter, strides: tuple[int, ...]) -> None:
    """Give a weight, its gradient and its optimizer state these strides; keep their values."""
    for tensor in (weight, weight.grad, *_state_of(training.optimizer, weight)):
        if tensor is not None and tensor.shape == weight.shape and _fills_its_stretch(tensor):
            _rearrange(tensor, strides)


def _rearrange(tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
    """Reorder the values within their stretch of memory."""
    values = tensor.detach().clone()
    in_place = tensor.data.as_strided(tensor.shape, strides)  # a version counter of its own
    in_place.copy_(values)
    tensor.data = in_place  # nor does this move the one that a live graph checks


def _state_of(optimizer: Any, weight: nn.Parameter) -> list[torch.Tensor]:
    optimizers = optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]
    return [
        value
        for one in optimizers
        if one is not None  # it is made after this, in a plan with a parallel strategy
        for value in one.state.get(weight, {}).values()
        if isinstance(value, torch.Tensor)
    ]


def _fills_its_stretch(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=_FORMATS[tensor.dim()])
