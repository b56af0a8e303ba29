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

from autofit.memory.tracer import Order
from autofit.prediction.cuda import autocast
from autofit.prediction.cuda.dispatch import beneath, emulate

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

# Matrix products in groups, as mixtures of experts make them.
#
# The meta device takes them in bfloat16 alone; CUDA takes float16 and float32 too, one product
# after the other (`_grouped_mm_cuda` of cuda/GroupedBlas.cpp).


def grouped_product(args: Any) -> tuple[torch.Tensor, Order]:
    """Stands in for `aten::_grouped_mm`: where an operand has two dimensions, groups divide one."""
    left, right = args[:2]
    groups = []
    if left.dim() == right.dim():
        groups = [args[2].shape[0] if left.dim() == 2 else left.shape[0]]
    result = left.new_empty((*groups, left.shape[-2], right.shape[-1]))
    return result, [result]


# Operators of the backward pass that are in place on CUDA, and are not on meta tensors.
#
# Autograd does without in-place operators where tensors are "like subclasses": meta tensors are,
# and every tensor is while a dispatch mode listens (ATen/TensorSubclassLikeUtils.h). So in a
# rehearsal gradients that meet at a fork are added up in new memory, and a scatter into zeros
# copies them. On a GPU the first gradient is added to, where nobody else holds it
# (`can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp), and zeros are written to
# (`FunctionsManual.cpp`).

_HELD_BY_AUTOGRAD_ALONE = 4
"""C++ references to an argument that arrives here: autograd's, and three on the way from there."""
_SCATTERS = frozenset({"scatter", "scatter_add", "index_add", "index_put"})
_INTO_ZEROS = frozenset(
    f"{name}Backward"
    for name in (
        "Cummax", "Cummin", "Gather", "Index", "IndexSelect", "Kthvalue", "Max", "Median", "Min",
        "Mode", "Nanmedian", "Sort", "Topk",
    )
)  # fmt: skip
_LOGITS = "BinaryCrossEntropyWithLogitsBackward"


_CAN_TELL = hasattr(torch.Tensor, "_use_count") and all(
    hasattr(torch._C, name)
    for name in ("_current_graph_task_id", "_current_autograd_node", "_storage_Use_Count")
)
"""Where torch lacks what this asks, additions take new memory, which errs on the high side."""


def is_in_place(name: str, args: Any) -> bool:
    """Whether `aten::<name>`, which autograd calls here, writes to its first argument on CUDA."""
    if (
        not _CAN_TELL
        or torch.is_grad_enabled()
        or not args
        or not isinstance(args[0], torch.Tensor)
    ):
        return False
    if torch._C._current_graph_task_id() == -1:
        return False
    if name in _SCATTERS:
        return _node() in _INTO_ZEROS
    if name == "add" or (name in ("sub", "mul") and _node() == _LOGITS):
        return _can_take(args[0], args[1])
    return False


def _can_take(sum_so_far: torch.Tensor, other: Any) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and sum_so_far.is_meta
        and sum_so_far.layout is other.layout is torch.strided
        and sum_so_far._use_count() == _HELD_BY_AUTOGRAD_ALONE  # type: ignore[attr-defined]  # private
        and _has_storage_alone(sum_so_far)
        and sum_so_far.dtype == torch.result_type(sum_so_far, other)
        and torch.broadcast_shapes(sum_so_far.shape, other.shape) == sum_so_far.shape  # type: ignore[no-untyped-call]  # torch's
        and _is_without_gaps(sum_so_far)
    )


def _has_storage_alone(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users == 2  # the tensor, and `storage` here


def _is_without_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, each once, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _node() -> str:
    """The kind of autograd's node that runs, or ran last, without the number of its overload."""
    node: Any = torch._C._current_autograd_node()
    return node.name().rstrip("0123456789") if node is not None else ""


# Losses whose kernels the meta device lacks, or whose results lie in other memory there.


def _ctc_loss(
    log_probabilities: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    """Lengths on the host are read as numbers, as CUDA does (LossCTC.cpp)."""
    with beneath():
        lengths: tuple[Any, Any] = input_lengths, target_lengths
        if log_probabilities.is_meta and not (input_lengths.is_meta or target_lengths.is_meta):
            lengths = input_lengths.tolist(), target_lengths.tolist()
        return aten.ctc_loss(log_probabilities, targets, *lengths, *options)  # type: ignore[no-any-return]  # operators are untyped


def ctc_loss(args: Any) -> tuple[Any, Order]:
    """Stands in for `aten::_ctc_loss`: the losses, and the table that backward needs.

    The table has a row of 2 * (longest target) + 1 for each step and sample (LossCTC.cu).
    """
    log_probabilities, targets, _, target_lengths = args[:4]
    steps, samples = log_probabilities.shape[:2]
    width = 2 * _longest(targets, target_lengths) + 1
    losses = log_probabilities.new_empty(samples)
    table = log_probabilities.new_empty(samples, steps, width)
    return (losses, table), [table, losses]


def ctc_loss_backward(args: Any) -> tuple[Any, Order]:
    """Stands in for `aten::_ctc_loss_backward`: the gradient, and a second table."""
    log_probabilities, table = args[1], args[6]
    gradient = torch.empty_like(log_probabilities)
    return gradient, [table.numel() * table.element_size(), gradient]


_IN_MEMORY_OF_ALL = frozenset(
    ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)


def in_memory_of_all(name: str, args: Any, result: torch.Tensor) -> torch.Tensor:
    """The result of a loss; where it is a mean or a sum, in memory for every element's loss.

    It is made for all elements and then resized to one number, which gives no memory back: as long
    as the loss lives, so does that (`TORCH_META_FUNC(mse_loss)` and others of BinaryOps.cpp and
    Loss.cpp, `binary_cross_entropy_out_cuda` of cuda/Loss.cu).
    """
    if name not in _IN_MEMORY_OF_ALL or result.dim():
        return result
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # torch's
    return result.new_empty(shape).resize_(())


def _longest(targets: torch.Tensor, lengths: Any) -> int:
    """The longest target, as far as it can be told: padded targets have it in their shape."""
    if targets.dim() == 2:
        return targets.shape[1]
    if isinstance(lengths, torch.Tensor):
        lengths = targets.shape if lengths.is_meta else lengths.tolist()
    return int(max(lengths, default=0))


emulate("ctc_loss.Tensor", _ctc_loss)
