"""Looks at a step: run without its update, and what it calls of torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autofit.strategy import TrainingView, undone


class Calls(TorchFunctionMode):
    """Tells of every call of a function of torch, with what it returned, while this is entered.

    But of none within code that is compiled, which would take this in.

    Args:
        on_call: called with the function and its result.
    """

    def __init__(self, on_call: Callable[[Callable[..., Any], Any], object]) -> None:
        super().__init__()
        self._on_call = on_call

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run what was called, and tell of it."""
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            self._on_call(func, result)
        return result


def run_step(training: TrainingView, batch: Any) -> None:
    """Run a step without the update."""
    with undone(training.wrap_optimizer_step(lambda update: None)):
        training.step(batch)
