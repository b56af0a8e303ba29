"""Casts of weights under autocast: a forward after an update runs with the updated weights.

Autocast drops its casts only where its outermost region is left, and a whole train_step may be one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


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
