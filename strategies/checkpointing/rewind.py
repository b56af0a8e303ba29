"""Shows the second run of a unit what the first one found, and leaves what is live alone.

What is shown has a name: a buffer or an attribute of a module its dotted one, the random states of
Python and numpy (torch's are kept by torch) those below.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .arguments import put_tensors, take_tensors

StatePath = tuple[str, str]
"""Dotted name of a module below the one that is run, and its buffer's or attribute's name."""

PYTHON, NUMPY = "Python's random state", "numpy's random state"

ABSENT = object()
"""In place of an attribute that is not there."""


class Rewind:
    """Shows state below a module as it is when this is made; the live one comes back after."""

    def __init__(self, holder: nn.Module, paths: Sequence[StatePath]) -> None:
        self._places = [_place(holder, *path) for path in paths]
        self._then = _copied([place.get() for place in self._places])
        self._live: list[Any] = []

    def __enter__(self) -> None:
        self._live = [place.get() for place in self._places]
        self._show(_copied(self._then))  # a second backward needs `then` once more

    def __exit__(self, *error: object) -> None:
        self._show(self._live)
        self._live = []

    def _show(self, values: Sequence[Any]) -> None:
        for place, value in zip(self._places, values, strict=True):
            place.put(value)


def generator_access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to get and set the state of a random number generator; None: it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    bits = getattr(value, "bit_generator", None)  # numpy's, which need not be installed
    if bits is not None and hasattr(bits, "state"):
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


class _Place(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _place(holder: nn.Module, module: str, name: str) -> _Place:
    if name == PYTHON:
        return _of_generator(random.getstate, random.setstate)
    if name == NUMPY:
        numpy = sys.modules["numpy"]
        return _of_generator(numpy.random.get_state, numpy.random.set_state)
    owner = holder.get_submodule(module)
    kept: dict[str, Any] = owner._buffers if name in owner._buffers else vars(owner)
    if access := generator_access(kept.get(name)):
        return _of_generator(*access)
    return _Place(partial(kept.get, name, ABSENT), partial(_put, kept, name))


def _of_generator(get: Callable[[], Any], put: Callable[[Any], Any]) -> _Place:
    """Its state in a function: what has no copy is not looked into."""
    return _Place(lambda: partial(_itself, get()), lambda state: put(state()))


def _itself(value: Any) -> Any:
    return value


def _put(kept: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        kept.pop(name, None)
    else:
        kept[name] = value


def _copied(values: Sequence[Any]) -> list[Any]:
    """Containers, objects and tensors of their own; what several of them share, they share anew."""
    tensors, nest = take_tensors(list(values))
    copies = {id(tensor): _clone(tensor) for tensor in tensors}
    copied: list[Any] = put_tensors(nest, tuple(copies[id(tensor)] for tensor in tensors))
    return copied


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
