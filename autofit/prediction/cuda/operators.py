"""Operators in the form that CUDA runs them, where the meta device has another one.

`KERNELS` replaces composite operators that ask in C++ whether their argument lies on a GPU: meta
tensors would get the unfused form, which keeps more for the backward pass. `STAND_INS` gives
results and allocations of operators that the meta device lacks. `is_in_place` and
`in_memory_of_all_losses` tell where CUDA's results share memory that meta's do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch

from autofit.memory.tracer import Order
from autofit.prediction.cuda import autocast
from autofit.prediction.cuda.autocast import beneath
from autofit.torch_private import missing, suggest_memory_format

aten: Any = torch.ops.aten


def is_in_place(name: str, args: Any) -> bool:
    """Return whether `aten::<name>`, called by autograd, writes to its first argument on CUDA.

    Autograd avoids in-place operators where tensors are "like subclasses": meta tensors are, and
    every tensor is under a dispatch mode (ATen/TensorSubclassLikeUtils.h). On a GPU it adds to the
    first of the gradients that meet at a fork where nobody else holds it
    (`can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp).
    """
    if torch.is_grad_enabled() or not args or not isinstance(args[0], torch.Tensor):
        return False
    if not _has_counts() or torch._C._current_graph_task_id() == -1:
        return False
    return name == "add" and _can_accumulate(args[0], args[1])


def in_memory_of_all_losses(name: str, args: Any, result: torch.Tensor) -> torch.Tensor:
    """Return the mean or sum of losses in memory that holds the loss of every element.

    CUDA computes the loss of each element and then resizes the result to one number, which keeps
    the memory as long as the result lives (`TORCH_META_FUNC(mse_loss)` and others of BinaryOps.cpp
    and Loss.cpp, `binary_cross_entropy_out_cuda` of cuda/Loss.cu).
    """
    if name not in _KEEP_ALL_LOSSES or result.dim():
        return result
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # torch's
    return result.new_empty(shape).resize_(())


_KEEP_ALL_LOSSES = frozenset(
    ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
_HELD_BY_AUTOGRAD_ALONE = 4
"""C++ references to an argument that arrives here: autograd's, and three on the way from there."""


@cache
def _has_counts() -> bool:
    return missing("gradients in place") is None


def _can_accumulate(gradient: torch.Tensor, other: Any) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and gradient.is_meta
        and gradient.layout is other.layout is torch.strided
        and gradient._use_count() == _HELD_BY_AUTOGRAD_ALONE  # type: ignore[attr-defined]  # private
        and _is_only_view(gradient)
        and gradient.dtype == torch.result_type(gradient, other)
        and torch.broadcast_shapes(gradient.shape, other.shape) == gradient.shape  # type: ignore[no-untyped-call]  # torch's
        and _is_dense(gradient)
    )


def _is_only_view(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users == 2  # the tensor, and `storage` here


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie side by side, each once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _dropout(data: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Run one kernel that keeps a mask of one byte an element (Dropout.cpp)."""
    with beneath():
        if not (data.is_meta and train and 0 < p < 1 and data.numel()):
            return aten.dropout(data, p, train)  # type: ignore[no-any-return]  # operators are untyped
        return aten.native_dropout(data, p, train)[0]  # type: ignore[no-any-return]  # likewise


def _batch_norm(
    data: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *others: Any,
) -> torch.Tensor:
    """Copy data with gaps for cuDNN; the copy is kept (`_batch_norm_impl_index`)."""
    with beneath():
        if data.is_meta and _suits_cudnn(data, weight, bias):
            data = data.contiguous(memory_format=suggest_memory_format(data))
        return aten.batch_norm(data, weight, bias, *others)  # type: ignore[no-any-return]  # likewise


def _suits_cudnn(
    data: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> bool:
    """Follow `_select_batch_norm_backend` of Normalization.cpp; other kernels take any strides."""
    if weight is None or bias is None or data.dim() < 3 or not torch.backends.cudnn.enabled:
        return False
    if data.dtype == torch.float16:
        return weight.dtype == torch.float32
    return torch.bfloat16 not in (data.dtype, weight.dtype)


# Up to torch 2.13 group_norm itself copies its argument where that is not contiguous.
_GROUP_NORM_KEEPS_LAYOUT = torch.__version__ >= "2.15"


def _group_norm(args: Any) -> tuple[Any, Order]:
    """Return what the meta device does, in CUDA's layout; torch 2.14 copies the data meanwhile."""
    (data,), copies = _as_group_norm_takes(args[:1], args[0])
    results = aten.native_group_norm(data, *args[1:])
    return results, [*copies, *results]


def _group_norm_backward(args: Any) -> tuple[Any, Order]:
    """Return likewise; the gradient is copied where its layout is not that of the data."""
    (gradient, data), copies = _as_group_norm_takes(args[:2], args[1])
    results = aten.native_group_norm_backward(gradient, data, *args[2:])
    return results, [*copies, *(made for made in results if made is not None)]


def _as_group_norm_takes(tensors: Any, data: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """Return tensors in the layout that CUDA's kernel takes, and the bytes of those it copies."""
    layout = suggest_memory_format(data) if _GROUP_NORM_KEEPS_LAYOUT else torch.contiguous_format
    copied = [each for each in tensors if not each.is_contiguous(memory_format=layout)]
    taken = [each.contiguous(memory_format=layout) for each in tensors]
    return taken, [each.nbytes for each in copied]


def _layer_norm(args: Any) -> tuple[Any, Order]:
    """Return what the meta device does; CUDA copies data that is not contiguous meanwhile."""
    results = aten.native_layer_norm(*args)
    copies = [] if args[0].is_contiguous() else [args[0].nbytes]
    return results, [*copies, *results]


def _native_dropout(args: Any) -> tuple[Any, Order]:
    """Return what the meta device does; CUDA makes the mask first (Dropout.cu)."""
    results = aten.native_dropout(*args)
    return results, [results[1], results[0]]


class _FusedRmsNorm(torch.autograd.Function):
    """Keeps what `_fused_rms_norm` keeps on CUDA: its input, and one number for each row."""

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


@cache
def _autocast_has_rms_norm() -> bool:
    """Up to torch 2.11 autocast leaves rms_norm alone, and bfloat16 data meets a float32 weight."""
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::rms_norm", "AutocastCUDA"
    )
    return has_kernel


def _rms_norm(
    data: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Fuse where data and weight have one type (layer_norm.cpp)."""
    with beneath():
        if _autocast_has_rms_norm() and autocast.is_on():
            data, weight = autocast.cast((data, weight), torch.float32)
        if not data.is_meta or (weight is not None and weight.dtype != data.dtype):
            return aten.rms_norm(data, normalized_shape, weight, eps)  # type: ignore[no-any-return]  # likewise
        return _FusedRmsNorm.apply(data, normalized_shape, weight)  # type: ignore[no-any-return, no-untyped-call]  # likewise


def _ctc_loss_of_tensors(
    log_probabilities: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    """Read lengths on the host as numbers, as CUDA does (LossCTC.cpp)."""
    with beneath():
        lengths: tuple[Any, Any] = input_lengths, target_lengths
        if log_probabilities.is_meta and not (input_lengths.is_meta or target_lengths.is_meta):
            lengths = input_lengths.tolist(), target_lengths.tolist()
        return aten.ctc_loss(log_probabilities, targets, *lengths, *options)  # type: ignore[no-any-return]  # likewise


def _ctc_loss(args: Any) -> tuple[Any, Order]:
    """Return the losses, and a table of 2 * (longest target) + 1 a step and sample (LossCTC.cu)."""
    log_probabilities, targets, _, target_lengths = args[:4]
    steps, samples = log_probabilities.shape[:2]
    width = 2 * _longest(targets, target_lengths) + 1
    losses = log_probabilities.new_empty(samples)
    table = log_probabilities.new_empty(samples, steps, width)
    return (losses, table), [table, losses]


def _ctc_loss_backward(args: Any) -> tuple[Any, Order]:
    """Return the gradient; a second table is needed meanwhile."""
    log_probabilities, table = args[1], args[6]
    gradient = torch.empty_like(log_probabilities)
    return gradient, [table.nbytes, gradient]


def _longest(targets: torch.Tensor, lengths: Any) -> int:
    """Return the longest target, or the most it can be where the lengths are unknown."""
    if targets.dim() == 2:  # padded to the longest
        return targets.shape[1]
    if isinstance(lengths, torch.Tensor):
        lengths = targets.shape if lengths.is_meta else lengths.tolist()
    return int(max(lengths, default=0))


def _grouped_product(args: Any) -> tuple[torch.Tensor, Order]:
    """Return products in groups; where an operand has two dimensions, groups divide one of them.

    The meta device takes them in bfloat16 alone, CUDA in float16 and float32 too
    (`_grouped_mm_cuda` of cuda/GroupedBlas.cpp).
    """
    left, right = args[:2]
    groups = []
    if left.dim() == right.dim():
        groups = [args[2].shape[0] if left.dim() == 2 else left.shape[0]]
    result = left.new_empty((*groups, left.shape[-2], right.shape[-1]))
    return result, [result]


KERNELS: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    "ctc_loss.Tensor": _ctc_loss_of_tensors,
    "dropout": _dropout,
    "rms_norm": _rms_norm,
}
STAND_INS: dict[str, Callable[[Any], tuple[Any, Order]]] = {
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _ctc_loss_backward,
    "_grouped_mm": _grouped_product,
    "native_dropout": _native_dropout,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_layer_norm": _layer_norm,
}
"""From the positional arguments: the results, and the order of allocations."""
