"""Model FLOPs of a training step: those that its forward and backward need, by operator.

As in the model FLOPs utilization (MFU) of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix
B) nothing counts that is computed again: neither what activation checkpointing recomputes, nor the
scores of attention that its fused backward does. PaLM's 6 N + 12 L H Q T a token, which holds for
decoders, is replaced by a count of products, convolutions and attention (whole, also where it is
causal, as in PaLM's). Operators without a formula, such as elementwise ones and kernels of other
libraries, count nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils.flop_counter import flop_registry

from autofit.torch_private import TorchDispatchMode

# torch's formula of attention's backward has five products; the first makes the scores again.
_SHARE_NOT_RECOMPUTED = 4 / 5


class ModelFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Counts model FLOPs while it is entered.

    Attributes:
        total: floating-point operations so far; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = formula_of(func)
        if count is not None and not _is_recomputed():
            with suppress(Exception):  # a step goes on without a rate
                self.total += count(*args, **(kwargs or {}), out_val=result) * _share(func)
        return result


def formula_of(func: Any) -> Callable[..., int] | None:
    """Return what counts the FLOPs of an operator's overload, or None if torch knows none."""
    name = func._schema.name.removeprefix("aten::")
    if name in _FLOPS:
        return _FLOPS[name]
    packet = getattr(torch.ops.aten, _ALIKE[name]) if name in _ALIKE else func._overloadpacket
    found: Callable[..., int] | None = flop_registry.get(packet)
    return found


def _share(func: Any) -> float:
    name = func._schema.name
    is_fused = "_attention" in name and name.endswith("backward")
    return _SHARE_NOT_RECOMPUTED if is_fused else 1.0


def _is_recomputed() -> bool:
    """Return whether checkpointing runs this operator again, within a backward."""
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None  # else the loss has gradients of gradients


def _of_rnn(data: torch.Tensor, weights: list[torch.Tensor], *_: Any, **__: Any) -> int:
    """Count one product a step and sample with each matrix."""
    rows = data.numel() // data.shape[-1]
    return 2 * rows * sum(weight.numel() for weight in weights if weight.dim() > 1)


def _of_rnn_backward(*args: Any, **kwargs: Any) -> int:
    """Count two: gradients of the data and of the weights."""
    return 2 * _of_rnn(*args, **kwargs)


def _of_groups(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count each row of the left operand with the matrix of its group."""
    return 2 * left.numel() * right.shape[-1]


# Operators that torch's registry does not have.
_FLOPS: dict[str, Callable[..., int]] = {
    "_cudnn_rnn": _of_rnn,
    "_cudnn_rnn_backward": _of_rnn_backward,
    "_grouped_mm": _of_groups,
}
# Likewise -> one that has the same first arguments, and is in the registry.
_ALIKE = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
}
