"""Composite operators that have a fused form on CUDA, and take it on meta tensors too.

Each of them asks in C++ whether its argument lies on a GPU, so meta tensors would get the unfused
form, which keeps more for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from autofit.prediction.dispatch import beneath, emulate

aten: Any = torch.ops.aten


def _dropout(data: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """One kernel that keeps a mask of one byte an element (Dropout.cpp)."""
    with beneath():
        if not (data.is_meta and train and 0 < p < 1 and data.numel()):
            return aten.dropout(data, p, train)  # type: ignore[no-any-return]  # operators are untyped
        return aten.native_dropout(data, p, train)[0]  # type: ignore[no-any-return]  # likewise


emulate("dropout", _dropout)
