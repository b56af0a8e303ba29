"""Runs a function now, keeps its inputs alone, and runs it again in the backward pass.

This is `torch.utils.checkpoint` in its non-reentrant form, made exact where that one is silently
not: buffers that a forward changes (running statistics, moving averages, spectral norm's vectors)
are shown to the second run as they were before the first, and are left alone by it.
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

BufferPath = tuple[str, str]
"""Dotted name of a module below the one that is run, and the name of its buffer."""


def recomputed(
    function: Callable[..., Any],
    holder: nn.Module,
    buffers: Sequence[BufferPath],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """`function(*args, **kwargs)`, its activations dropped and computed again when needed.

    Args:
        function: runs `holder`, or a part of it.
        holder: the module below which the buffers are found.
        buffers: those that a forward may change.
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

    contexts = partial(_contexts, holder, buffers)
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
    holder: nn.Module, buffers: Sequence[BufferPath]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What the first run and the second run are done under."""
    return nullcontext(), _BuffersAsNow(holder, buffers) if buffers else nullcontext()


class _BuffersAsNow:
    """Shows a module's buffers as they are when this is made; the live ones come back after."""

    def __init__(self, holder: nn.Module, paths: Sequence[BufferPath]) -> None:
        self._owners = [(holder.get_submodule(module)._buffers, name) for module, name in paths]
        self._then = [_copy(buffers[name]) for buffers, name in self._owners]
        self._live: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._live = [buffers[name] for buffers, name in self._owners]
        for (buffers, name), then in zip(self._owners, self._then, strict=True):
            buffers[name] = _copy(then)  # a second backward needs `then` once more

    def __exit__(self, *error: object) -> None:
        for (buffers, name), live in zip(self._owners, self._live, strict=True):
            buffers[name] = live
        self._live = []


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.detach().clone()
