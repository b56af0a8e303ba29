"""Operators of the backward pass that are in place on CUDA, and are not on meta tensors.

Autograd does without in-place operators where tensors are "like subclasses": meta tensors are, and
every tensor is while a dispatch mode listens (ATen/TensorSubclassLikeUtils.h). So in a rehearsal
gradients that meet at a fork are added up in new memory, and a scatter into zeros copies them. On a
GPU the first gradient is added to, where nobody else holds it (`can_accumulate_inplace` of
torch/csrc/autograd/input_buffer.cpp), and zeros are written to (`FunctionsManual.cpp`).
"""

from __future__ import annotations

from typing import Any

import torch

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
