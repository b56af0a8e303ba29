"""Autocast around the forward and the loss alone, whatever runs beside them.

A user's `training_step` runs under the contexts of a plan's forward, since its forwards and losses
may stand anywhere in it. Its backward passes and updates leave autocast: gradients are computed and
applied in the types that they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# Enters autocast as it was before a plan's contexts were entered.
Leave: TypeAlias = Callable[[], AbstractContextManager[Any]]


class Autocast(NamedTuple):
    """How autocast is set on a kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> Autocast | None:
        """Return how it is set, or None if it has none on such devices."""
        if not torch.amp.is_autocast_available(device_type):
            return None
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        return cls(device_type, enabled, dtype, torch.is_autocast_cache_enabled())

    def entered(self) -> torch.autocast:
        """Return a context in which it is set so."""
        return torch.autocast(
            self.device_type, self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )


@contextmanager
def left_beside_forwards(before: Autocast | None) -> Iterator[Leave]:
    """Leave the autocast in force where backward passes and updates run inside.

    Args:
        before: what is in force there.

    Yields:
        the context of other code that is to leave it. It does nothing where the user's code has
        set autocast otherwise since.
    """
    inside = None if before is None else Autocast.now(before.device_type)
    if before is None or inside is None or inside == before:
        yield nullcontext
        return

    def leave() -> AbstractContextManager[Any]:
        return before.entered() if Autocast.now(before.device_type) == inside else nullcontext()

    with _in_updates(leave, inside), _in_backward_passes(leave):
        yield leave


@contextmanager
def _in_backward_passes(leave: Leave) -> Iterator[None]:
    """Have every backward pass run so: `loss.backward()`, `torch.autograd.grad` and the like."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    @wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        with leave():
            return engine(*args, **kwargs)

    autograd._engine_run_backward = run
    try:
        yield
    finally:
        autograd._engine_run_backward = engine


@contextmanager
def _in_updates(leave: Leave, inside: Autocast) -> Iterator[None]:
    """Have each step of any optimizer run so, and a closure that it calls as the forward does.

    Weights are cast anew after each step, and in each call of a closure.
    """
    left: list[ExitStack] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        left.append(ExitStack())
        left[-1].enter_context(leave())
        fresh = {name: closure(value) for name, value in kwargs.items()}
        return (optimizer, *map(closure, args[1:])), fresh

    def after(*step: Any) -> None:
        left.pop().close()
        torch.clear_autocast_cache()

    def closure(argument: Any) -> Any:
        if not callable(argument):
            return argument

        def run() -> Any:
            torch.clear_autocast_cache()
            with inside.entered():
                return argument()

        return run

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while left:  # of steps that raised
            left.pop().close()
