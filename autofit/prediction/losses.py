"""Losses whose kernels the meta device lacks."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Order: TypeAlias = list[int | torch.Tensor | None]
"""What is allocated when; see `MemoryTracer.allocate_in_order`."""


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


def _longest(targets: torch.Tensor, lengths: Any) -> int:
    """The longest target, as far as it can be told: padded targets have it in their shape."""
    if targets.dim() == 2:
        return targets.shape[1]
    if isinstance(lengths, torch.Tensor):
        lengths = targets.shape if lengths.is_meta else lengths.tolist()
    return int(max(lengths, default=0))
