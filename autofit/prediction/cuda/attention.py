"""`scaled_dot_product_attention` on meta tensors runs the kernel that CUDA would choose.

The kernel decides what is kept for the backward pass, which matters more for memory than any other
choice. Follows aten/src/ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp: the user's
switches (`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_flash_sdp` and the like),
then an order of preference, then what each kernel supports. The GPU is asked last, and only where
its answer matters: what it was not asked holds for other GPUs too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from autofit.devices.gpu_catalogue import Gpu
from autofit.prediction.cuda import autocast

aten: Any = torch.ops.aten
_switches: Any = torch.backends.cuda  # torch does not annotate them
# The GPU whose kernels are chosen; `fake_cuda` sets it.
emulated_gpu: ContextVar[Gpu] = ContextVar("emulated_gpu")


_DEFAULT_ORDER = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
]
# Wheels for CUDA 12 have an older one. A build for the CPU has none: that of the wheels of its
# version is assumed, which is new enough from torch 2.11 on.
_CUDNN_PREFERRED_FROM = 91501
_ASSUMED_CUDNN = _CUDNN_PREFERRED_FROM if torch.__version__ >= "2.11" else 91002


@dataclass(frozen=True)
class Call:
    """One call of `scaled_dot_product_attention`; tensors are (..., heads, length, width)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


def chosen_kernel(call: Call, gpu: Gpu) -> SDPBackend:
    """Return the kernel that CUDA chooses for a call on that GPU."""
    if not _shapes_suit_fused(call):
        return SDPBackend.MATH
    return next(
        (kernel for kernel in _order(call, gpu) if _KERNELS[kernel][0](call, gpu)), SDPBackend.MATH
    )


def _order(call: Call, gpu: Gpu) -> list[SDPBackend]:
    """Return the user's order; cuDNN comes first if that is the default and the GPU suits it."""
    priorities: list[int] = torch._C._get_sdp_priority_order()
    order = [each for each in map(SDPBackend, priorities) if each in _KERNELS]
    version = torch.backends.cudnn.version() or _ASSUMED_CUDNN  # type: ignore[no-untyped-call]  # torch's
    preferred = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    preferred = preferred and version >= _CUDNN_PREFERRED_FROM and _half(call, gpu)
    if order == _DEFAULT_ORDER and preferred and gpu.prefers_cudnn_attention:
        return [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
    return order


def _shapes_suit_fused(call: Call) -> bool:
    query, key, value = call.tensors
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 for tensor in call.tensors):
        return False
    same_type = query.dtype == key.dtype == value.dtype
    same_batch = query.size(0) == key.size(0) == value.size(0)
    return same_type and same_batch and min(query.size(2), key.size(2)) > 0


def _heads_agree(call: Call) -> bool:
    return call.query.size(1) == call.key.size(1) == call.value.size(1)


def _half(call: Call, gpu: Gpu) -> bool:
    dtype = call.query.dtype
    return dtype == torch.float16 or (dtype == torch.bfloat16 and gpu.native_bfloat16)


def _cudnn_takes(width: int, gpu: Gpu) -> bool:
    return width % 8 == 0 and (width <= 128 or (width <= 256 and gpu.has_wide_cudnn_heads))


def _cudnn_supports(call: Call, gpu: Gpu) -> bool:
    query, key, value = call.tensors
    return (
        _switches.cudnn_sdp_enabled()
        and _half(call, gpu)
        and gpu.has_flash_attention
        and (_heads_agree(call) or call.grouped)
        and all(_cudnn_takes(tensor.size(3), gpu) for tensor in (query, value))
        and query.size(3) == key.size(3)
        and key.size(2) > 1
        and (query.size(2) > 1 or call.dropout == 0)
        and _mask_suits_cudnn(call)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _mask_suits_cudnn(call: Call) -> bool:
    """Return whether the mask has two or four dimensions that broadcast, and no gradient."""
    mask = call.mask
    if mask is None:
        return True
    scores = *call.query.shape[:3], call.key.size(2)
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    fits = mask.dim() in (2, 4) and all(size in (1, whole) for size, whole in pairs)
    return fits and not mask.requires_grad


def _flash_supports(call: Call, gpu: Gpu) -> bool:
    query, key, value = call.tensors
    return (
        _switches.flash_sdp_enabled()
        and _half(call, gpu)
        and gpu.has_flash_attention
        and call.mask is None
        and (_heads_agree(call) or call.grouped)
        and query.size(3) == key.size(3) == value.size(3) <= 256
        and not (call.causal and query.size(2) != key.size(2))
    )


def _efficient_supports(call: Call, gpu: Gpu) -> bool:
    is_float32 = call.query.dtype == torch.float32
    alignment = 4 if is_float32 else 8
    is_aligned = all(tensor.size(3) % alignment == 0 for tensor in (call.query, call.value))
    return (
        _switches.mem_efficient_sdp_enabled()
        and (is_float32 or _half(call, gpu))
        and _heads_agree(call)
        and (is_aligned or (is_float32 and not gpu.tf32))
    )


_in_math_backend: ContextVar[bool] = ContextVar("in_math_backend", default=False)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    with autocast.beneath():
        query, key, value, mask = autocast.lowered((query, key, value, attn_mask))
        call = Call(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
        kernel = chosen_kernel(call, emulated_gpu.get()) if query.is_meta else SDPBackend.MATH
    with _math_backend() if kernel == SDPBackend.MATH else autocast.beneath():
        return _KERNELS[kernel][1](call)


@contextmanager
def _math_backend() -> Iterator[None]:
    """Let the emulation's kernels act on what the math backend calls, without its autocast."""
    token, was_on = _in_math_backend.set(True), autocast.is_on()
    torch.set_autocast_enabled("cuda", False)  # torch.autocast would clear the cache of casts
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", was_on)
        _in_math_backend.reset(token)


def adds_mask(name: str, args: Any, result: Any) -> bool:
    """Return whether `aten::<name>` adds the mask to the scores, which CUDA does in place.

    The math backend avoids that where tensors are "like subclasses"; see `operators.is_in_place`.
    A mask that is larger than the scores is left to what follows.
    """
    if name != "add" or not _in_math_backend.get() or not result.is_meta:
        return False
    scores, mask = args[:2]
    like = (scores.shape, scores.dtype) == (result.shape, result.dtype)
    return like and isinstance(mask, torch.Tensor)


def _math(call: Call) -> Any:
    return aten._scaled_dot_product_attention_math(
        *call.tensors,
        _additive(call),
        call.dropout,
        call.causal,
        None,
        scale=call.scale,
        enable_gqa=call.grouped,
    )[0]


def _cudnn(call: Call) -> Any:
    return aten._scaled_dot_product_cudnn_attention(
        *call.tensors,
        _additive(call),
        call.needs_gradient,
        call.dropout,
        call.causal,
        False,
        scale=call.scale,
    )[0]


def _flash(call: Call) -> Any:
    """Pad widths to a multiple of 8, and cut the result back."""
    width = call.query.size(3)
    padded = [torch.nn.functional.pad(t, (0, -width % 8)) if width % 8 else t for t in call.tensors]
    scale = call.scale if call.scale is not None else 1 / math.sqrt(width)
    return aten._scaled_dot_product_flash_attention(
        *padded, call.dropout, call.causal, False, scale=scale
    )[0][..., :width]


def _efficient(call: Call) -> Any:
    mask = _additive(call)
    if mask is not None:
        mask = _aligned(mask, call)
    return aten._scaled_dot_product_efficient_attention(
        *call.tensors, mask, call.needs_gradient, call.dropout, call.causal, scale=call.scale
    )[0]


# Whether an implementation takes a call, and how it runs on meta.
_KERNELS: dict[SDPBackend, tuple[Callable[[Call, Gpu], bool], Callable[[Call], Any]]] = {
    SDPBackend.CUDNN_ATTENTION: (_cudnn_supports, _cudnn),
    SDPBackend.FLASH_ATTENTION: (_flash_supports, _flash),
    SDPBackend.EFFICIENT_ATTENTION: (_efficient_supports, _efficient),
    SDPBackend.MATH: (lambda call, gpu: bool(_switches.math_sdp_enabled()), _math),
}


def _additive(call: Call) -> torch.Tensor | None:
    """Return a boolean mask as zeros and minus infinity; other masks as they are."""
    mask = call.mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=call.query.dtype)
    return zeros.masked_fill_(mask.logical_not(), -math.inf)


def _aligned(mask: torch.Tensor, call: Call) -> torch.Tensor:
    """Return a mask with strides of multiples of 8 elements, expanded to the scores' shape.

    `preprocess_mask` of attention.cpp, which adds 8 where the length is such a multiple.
    """
    length = mask.size(-1)
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask.expand(call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))


KERNELS: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": _attention}
