"""Runs a function now, keeps its inputs alone, and runs it again in the backward pass.

This is `torch.utils.checkpoint` in its non-reentrant form, made exact where that one is silently
not: state that a forward changes (running statistics, moving averages, spectral norm's vectors,
counts and caches in attributes) is shown to the second run as it was before the first, and is left
alone by it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .arguments import put_tensors, take_tensors
from .rewind import Rewind, StatePath


def recomputed(
    function: Callable[..., Any],
    holder: nn.Module,
    state: Sequence[StatePath],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """`function(*args, **kwargs)`, its activations dropped and computed again when needed.

    Args:
        function: runs `holder`, or a part of it.
        holder: the module below which the state is found.
        state: what a forward may change.
        args, kwargs: tensors may stand at any depth of tuples, lists, dicts and dataclasses.
    """
    if torch.compiler.is_compiling():
        # the compiler makes buffer updates functional by itself, and refuses a context_fn
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    if not torch.is_grad_enabled() or not _hooks_allowed():
        return function(*args, **kwargs)
    tensors, nest = take_tensors((tuple(args), dict(kwargs)))
    live = [(args, kwargs)]

    def run(*tensors: torch.Tensor) -> Any:
        # what the first run does to the caller's objects is seen there; the second run finds them
        # as the first did, and keeps what it does to them to itself
        own_args, own_kwargs = live.pop() if live else put_tensors(nest, tensors)
        return function(*own_args, **own_kwargs)

    contexts = partial(_contexts, holder, state)
    return checkpoint(run, *tensors, use_reentrant=False, context_fn=contexts)


def _hooks_allowed() -> bool:
    """Whether autograd lets saved tensors be replaced; under `torch.func` it does not."""
    autograd: Any = torch._C._autograd  # torch annotates only part of it
    if autograd._saved_tensors_hooks_is_enabled():
        return True
    warnings.warn(
        "activation checkpointing is off inside torch.func transforms: they do not allow saved "
        "tensors to be recomputed, so this pass keeps all its activations",
        stacklevel=3,
    )
    return False


def _contexts(
    holder: nn.Module, state: Sequence[StatePath]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What the first run and the second run are done under."""
    return nullcontext(), Rewind(holder, state) if state else nullcontext()
