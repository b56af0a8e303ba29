"""Matrix products in groups, as mixtures of experts make them.

The meta device takes them in bfloat16 alone; CUDA takes float16 and float32 too, one product after
the other (`_grouped_mm_cuda` of cuda/GroupedBlas.cpp).
"""

from __future__ import annotations

from typing import Any

import torch

from autofit.memory.tracer import Order


def grouped_product(args: Any) -> tuple[torch.Tensor, Order]:
    """Stands in for `aten::_grouped_mm`: where an operand has two dimensions, groups divide one."""
    left, right = args[:2]
    groups = []
    if left.dim() == right.dim():
        groups = [args[2].shape[0] if left.dim() == 2 else left.shape[0]]
    result = left.new_empty((*groups, left.shape[-2], right.shape[-1]))
    return result, [result]
