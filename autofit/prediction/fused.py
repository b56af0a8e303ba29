"""Composite operators that have a fused form on CUDA, and take it on meta tensors too.

Each of them asks in C++ whether its argument lies on a GPU, so meta tensors would get the unfused
form, which keeps more for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from autofit.prediction import autocast
from autofit.prediction.dispatch import beneath, emulate

aten: Any = torch.ops.aten


def _dropout(data: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """One kernel that keeps a mask of one byte an element (Dropout.cpp)."""
    with beneath():
        if not (data.is_meta and train and 0 < p < 1 and data.numel()):
            return aten.dropout(data, p, train)  # type: ignore[no-any-return]  # operators are untyped
        return aten.native_dropout(data, p, train)[0]  # type: ignore[no-any-return]  # likewise


def _mish_backward(gradient: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """One kernel (Activation.cpp); elsewhere it is composed of seven operators."""
    with beneath():
        if not data.is_meta or torch.is_grad_enabled():
            return aten.mish_backward(gradient, data)  # type: ignore[no-any-return]  # likewise
        return torch.empty_like(data)


class _FusedRmsNorm(torch.autograd.Function):
    """What `_fused_rms_norm` keeps on CUDA: its input, and one number for each row."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, shape: Any, weight: Any) -> torch.Tensor:
        rows = data.numel() // max(prod(shape), 1)
        scale = torch.empty(rows, dtype=torch.float32, device="meta")
        ctx.save_for_backward(data, weight, scale)
        return torch.empty_like(data)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        data, weight, _ = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if weight is not None else None
        return torch.empty_like(data), None, of_weight


def _batch_norm(
    data: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *others: Any,
) -> torch.Tensor:
    """cuDNN takes data without gaps, and that copy is kept (`_batch_norm_impl_index`).

    It takes all but bfloat16, from three dimensions on (`_select_batch_norm_backend` of
    Normalization.cpp); PyTorch's own kernels read any strides.
    """
    with beneath():
        if data.is_meta and _suits_cudnn(data, weight, bias):
            data = data.contiguous(memory_format=suggest_memory_format(data))
        return aten.batch_norm(data, weight, bias, *others)  # type: ignore[no-any-return]  # likewise


def _suits_cudnn(
    data: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> bool:
    if weight is None or bias is None or data.dim() < 3 or not torch.backends.cudnn.enabled:
        return False
    if data.dtype == torch.float16:
        return weight.dtype == torch.float32
    return torch.bfloat16 not in (data.dtype, weight.dtype)


_RMS_NORM_IS_CAST: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::rms_norm", "AutocastCUDA"
)
"""Up to torch 2.11 autocast leaves it alone, and bfloat16 data meets a float32 weight."""


def _rms_norm(
    data: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Fused where data and weight have one type (layer_norm.cpp)."""
    with beneath():
        if _RMS_NORM_IS_CAST and autocast.is_on():
            data, weight = autocast.in_float32(data), autocast.in_float32(weight)
        if not data.is_meta or (weight is not None and weight.dtype != data.dtype):
            return aten.rms_norm(data, normalized_shape, weight, eps)  # type: ignore[no-any-return]  # likewise
        return _FusedRmsNorm.apply(data, normalized_shape, weight)  # type: ignore[no-any-return, no-untyped-call]  # likewise


def _softmax(name: str) -> Callable[..., torch.Tensor]:
    """A softmax of float16 with a float32 result is one kernel, without a copy of its argument."""
    plain, fused = getattr(aten, name).int, getattr(aten, f"_{name}")

    def kernel(data: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        with beneath():
            if autocast.is_on() and dtype is None and data.is_floating_point() and data.is_meta:
                dtype = data.dtype if data.dtype == torch.float64 else torch.float32
            if data.is_meta and data.dtype == torch.float16 and dtype == torch.float32:
                return fused(data, dim, True)  # type: ignore[no-any-return]  # likewise
            return plain(data, dim, dtype)  # type: ignore[no-any-return]  # likewise

    return kernel


emulate("batch_norm", _batch_norm)
emulate("dropout", _dropout)
emulate("mish_backward", _mish_backward)
emulate("rms_norm", _rms_norm)
emulate("softmax.int", _softmax("softmax"))
emulate("log_softmax.int", _softmax("log_softmax"))
