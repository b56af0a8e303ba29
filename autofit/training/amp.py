"""The scale of a training's loss: float16 gradients kept in range, over one optimizer or several.

Promises: each optimizer is stepped at most once under one scale, and the scale changes only while
no gradients wait that have it, or these are brought to the new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class LossScale:
    """A gradient scaler, if there is one, and which optimizers were stepped under its scale.

    Attributes:
        scaler: what scales; None: nothing does, and everything here passes through.
        was_used: whether it has scaled a loss since this was last set to False.
    """

    def __init__(self) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self.was_used = False
        self._stepped: list[torch.optim.Optimizer] = []

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, which backward starts from."""
        if self.scaler is None:
            return loss
        self.was_used = True
        return self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of that optimizer."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def begin(
        self, optimizers: Sequence[torch.optim.Optimizer], of: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Before `optimizers` are stepped, `of` all that there are: one scale, one step of each."""
        if any(optimizer in self._stepped for optimizer in optimizers):
            self.adapt(of)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update, unless a gradient is infinite or NaN."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def end(
        self, optimizers: Sequence[torch.optim.Optimizer], of: Sequence[torch.optim.Optimizer]
    ) -> None:
        """After they were stepped: the scale stays while gradients of others wait that have it."""
        if self.scaler is None:
            return
        self._stepped += optimizers
        if not _gradients(of):
            self.adapt(of)

    def adapt(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let the scaler choose the next scale, and bring gradients that wait to it."""
        stepped, self._stepped = self._stepped, []
        if self.scaler is None or not stepped:
            return
        waiting = _gradients(optimizers)
        before = self.scaler.get_scale() if waiting else 1.0  # a GPU is waited for to read it
        self.scaler.update()
        factor = self.scaler.get_scale() / before if waiting else 1.0
        for gradient in waiting if factor != 1.0 else ():
            gradient.mul_(factor)


def _gradients(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = {parameter for group in groups for parameter in group["params"]}
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


# Casts of weights under autocast: a forward after an update runs with the updated weights.
#
# Autocast drops its casts only where its outermost region is left, and a whole training_step may be
# one.


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Inside it, autocast casts weights anew after each step of any optimizer.

    One that calls a closure updates between its calls too.
    """
    handles = (
        register_optimizer_step_pre_hook(_with_fresh_closures),
        register_optimizer_step_post_hook(_drop_casts),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_fresh_closures(optimizer: Any, args: Any, kwargs: Any) -> Any:
    fresh = {name: _fresh(value) for name, value in kwargs.items()}
    return (optimizer, *map(_fresh, args[1:])), fresh


def _fresh(argument: Any) -> Any:
    if not callable(argument):
        return argument

    def closure() -> Any:
        _drop_casts()
        return argument()

    return closure


def _drop_casts(*step: Any) -> None:
    torch.clear_autocast_cache()
