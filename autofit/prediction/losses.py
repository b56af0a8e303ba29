"""Losses whose kernels the meta device lacks, or whose results lie in other memory there."""

from __future__ import annotations

from typing import Any

import torch

from autofit.memory.tracer import Order
from autofit.prediction.dispatch import beneath, emulate

aten: Any = torch.ops.aten


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
