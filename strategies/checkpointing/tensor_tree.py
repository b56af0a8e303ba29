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

from autofit.errors import is_users_class

_Leaf = Callable[[Any], Any]

_Known = dict[int, tuple[Any, Any]]
"""By id: an object that was copied, which keeps its id while it is held here, and its copy."""


@dataclasses.dataclass(frozen=True)
class _Slot:
    index: int


def take_tensors(value: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors in a nest of containers and objects, and a copy with a mark for each."""
    tensors: list[torch.Tensor] = []

    def out(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    return tensors, _rebuilt(value, out, {})


def put_tensors(nest: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Return what `take_tensors` took apart, with these tensors and containers of its own."""

    def back(leaf: Any) -> Any:
        return tensors[leaf.index] if isinstance(leaf, _Slot) else leaf

    return _rebuilt(nest, back, {})


def is_helper(value: Any) -> bool:
    """Whether this is an object of the user's own, with attributes that a forward may change."""
    has_attributes = hasattr(value, "__dict__") and not callable(value)
    return has_attributes and is_users_class(type(value))


def _rebuilt(value: Any, leaf: _Leaf, known: _Known) -> Any:
    """Return a copy; a part that occurs twice, or within itself, is copied once."""
    if isinstance(value, torch.Tensor | _Slot):
        return leaf(value)
    if value is None or isinstance(value, int | float | str):  # most of what there is
        return value
    if id(value) not in known:
        try:
            rebuilt = _copied(value, leaf, known)
        except Exception:  # whatever a class does to refuse, its object is shared
            rebuilt = value
        known[id(value)] = value, rebuilt
    return known[id(value)][1]


def _copied(value: Any, leaf: _Leaf, known: _Known) -> Any:
    if hasattr(type(value), "__del__"):  # which would run for the copy, too
        return value
    if isinstance(value, tuple):
        each = [_rebuilt(item, leaf, known) for item in value]
        return value._make(each) if hasattr(value, "_make") else type(value)(each)
    if type(value) is list:
        items: list[Any] = []
        known[id(value)] = value, items
        items += [_rebuilt(item, leaf, known) for item in value]
        return items
    if isinstance(value, dict):
        named = copy.copy(value)
        known[id(value)] = value, named
        for key, item in value.items():
            named[key] = _rebuilt(item, leaf, known)
        return named
    if isinstance(value, type) or not (dataclasses.is_dataclass(value) or is_helper(value)):
        return value
    return _copied_object(value, leaf, known)


def _copied_object(value: Any, leaf: _Leaf, known: _Known) -> Any:
    """Copy attributes where they are kept, past properties and frozen classes."""
    rebuilt = copy.copy(value)
    kept = getattr(value, "__dict__", {})
    if rebuilt is value or getattr(rebuilt, "__dict__", None) is kept:  # an enumeration's member
        return value
    known[id(value)] = value, rebuilt
    for name, item in list(kept.items()):
        vars(rebuilt)[name] = _rebuilt(item, leaf, known)
    for name in _fields(value):
        if name not in kept:  # but in a slot
            object.__setattr__(rebuilt, name, _rebuilt(getattr(value, name), leaf, known))
    return rebuilt


def _fields(value: Any) -> list[str]:
    """Return the names of the fields of a dataclass that are set."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [field.name for field in fields if hasattr(value, field.name)]
