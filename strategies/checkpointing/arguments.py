"""Takes the tensors out of a call's arguments and puts them back.

`torch.utils.checkpoint` looks after positional tensors alone: it notices when they are changed in
place, and it keeps the random state of their devices. So whatever a module is called with (keyword
arguments, tuples, lists, dicts, dataclasses, objects of the user's own such as key-value caches),
its tensors are handed over positionally.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

_NOT_THE_USERS = ("torch", "builtins", "weakref", "threading", "functools")
"""Objects of these packages hold no state of a model's, and some refuse to be copied."""


@dataclasses.dataclass(frozen=True)
class _Slot:
    index: int


def take_tensors(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors in a nest of containers and objects, and a copy with a mark for each of them."""
    tensors: list[torch.Tensor] = []

    def out(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    return tensors, _rebuilt(value, out, {})


def put_tensors(nest: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """What `take_tensors` took apart, with these tensors in it and containers of its own."""

    def back(leaf: Any) -> Any:
        return tensors[leaf.index] if isinstance(leaf, _Slot) else leaf

    return _rebuilt(nest, back, {})


def is_helper(value: Any) -> bool:
    """Whether this is an object of the user's own, with attributes that a forward may change."""
    has_attributes = hasattr(value, "__dict__") and not callable(value)
    return has_attributes and is_the_users(type(value))


def is_the_users(cls: type) -> bool:
    """Whether a class comes from none of the packages whose objects hold no state of a model's."""
    return cls.__module__.partition(".")[0] not in _NOT_THE_USERS


def _rebuilt(value: Any, leaf: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    """A copy; what stands twice among `known`, or within itself, is copied once."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, tuple):
        each = [_rebuilt(item, leaf, known) for item in value]
        return value._make(each) if hasattr(value, "_make") else type(value)(each)
    if isinstance(value, torch.Tensor | _Slot):
        return leaf(value)
    if type(value) is list:
        items = known[id(value)] = []
        items += [_rebuilt(item, leaf, known) for item in value]
        return items
    if isinstance(value, dict):
        known[id(value)] = named = copy.copy(value)
        for key, item in value.items():
            named[key] = _rebuilt(item, leaf, known)
        return named
    if isinstance(value, type) or not (dataclasses.is_dataclass(value) or is_helper(value)):
        return leaf(value)
    return _rebuilt_object(value, leaf, known)


def _rebuilt_object(value: Any, leaf: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    try:
        rebuilt = copy.copy(value)
    except Exception:  # a lock, say: whatever a class does to refuse, its object is shared
        rebuilt = value
    known[id(value)] = rebuilt
    if rebuilt is value:  # so is an enumeration's member
        return value
    is_dataclass = dataclasses.is_dataclass(value)
    names = [each.name for each in dataclasses.fields(value)] if is_dataclass else list(vars(value))
    for name in names:
        item = _rebuilt(getattr(value, name), leaf, known)
        object.__setattr__(rebuilt, name, item)  # a frozen one refuses plain assignment
    return rebuilt
