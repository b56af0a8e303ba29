"""A model that does something else, such as fail, at each micro-batch that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from autofit.units import GIB

NO_FAULT = 2
"""A micro-batch at which a `FaultyModel` has no fault."""

Fault: TypeAlias = Callable[[Any, torch.Tensor], object]
"""Called with the model and its output in every forward; a tensor that it returns replaces it."""


class FaultyModel(nn.Module):
    """A small model with a fault at each micro-batch that is listed."""

    def __init__(self, faults: Mapping[int, Fault] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.faults = dict(faults or {})
        self.kept: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs)
        if len(inputs) in self.faults:
            replaced = self.faults[len(inputs)](self, output)
            return replaced if isinstance(replaced, torch.Tensor) else output
        return output


class AllocatesInBackward(torch.autograd.Function):
    """Needs 2 GiB in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + gradient.new_empty(2 * GIB // 4).max()


def runs_out_in_forward(model: Any, output: torch.Tensor) -> torch.Tensor:
    return output + output.new_empty(2 * GIB // 4).max()


def runs_out_in_backward(model: Any, output: torch.Tensor) -> Any:
    return AllocatesInBackward.apply(output)  # type: ignore[no-untyped-call]  # torch left it so
