"""Take the tensors out of the arguments of a call, and put others in their places.

`torch.utils.checkpoint` looks after positional tensors alone: it notices when they are changed in
place, and keeps the random state of their devices. So whatever a module is called with (keyword
arguments, tuples, lists, dicts, dataclasses, objects of the user's own such as key-value caches),
its tensors are handed over positionally.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from autofit.errors import is_users_class

# Where the first items of a container are this many without a tensor, the others are data (a
# vocabulary, an index): copying them, at each call of each unit, would take longer than to train.
MAX_ITEMS_WITHOUT_TENSOR = 64


@dataclass(frozen=True)
class _Slot:
    """Stands where a tensor was."""

    index: int


def take_tensors(value: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors in a nest of containers and objects, and a copy with a slot for each."""
    tensors: list[torch.Tensor] = []

    def slot(tensor: torch.Tensor) -> _Slot:
        tensors.append(tensor)
        return _Slot(len(tensors) - 1)

    return tensors, _Copier(torch.Tensor, slot).copy(value)


def put_tensors(nest: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Return what `take_tensors` took apart, with these tensors and containers of its own."""
    return _Copier(_Slot, lambda slot: tensors[slot.index]).copy(nest)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nest of containers and objects."""
    return take_tensors(value)[0]


class _Copier:
    """Copies a nest with its leaves replaced; what occurs twice, or in itself, is copied once.

    Args:
        leaf: type of the leaves.
        replace: returns what stands in place of a leaf.
    """

    def __init__(self, leaf: type, replace: Callable[[Any], Any]) -> None:
        self._leaf = leaf
        self._replace = replace
        # By id: an object, which keeps its id while it is held here, and its copy
        self._copies: dict[int, tuple[Any, Any]] = {}

    def copy(self, value: Any) -> Any:
        if value is None or isinstance(value, int | float | str):  # most of what there is
            return value
        if id(value) not in self._copies:
            try:
                copied = self._copied(value)
            except Exception:  # whatever a class does to refuse, its object is shared
                copied = value
            self._copies[id(value)] = value, copied
        return self._copies[id(value)][1]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, self._leaf):
            return self._replace(value)
        if not _is_nest(value) or (isinstance(value, tuple) and self._is_data(value)):
            return value
        if isinstance(value, tuple):
            items = [self.copy(item) for item in value]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        copied = copy.copy(value)
        attributes = getattr(value, "__dict__", {})
        if copied is value or getattr(copied, "__dict__", None) is attributes:
            return value  # an enumeration's member, or another object that all share
        self._copies[id(value)] = value, copied
        if not (isinstance(value, list | dict) and self._is_data(value)):
            self._fill(copied, value, attributes)
        return copied

    def _is_data(self, items: Any) -> bool:
        """Return whether a container has many items, and no leaf among the first of them."""
        values = items.values() if isinstance(items, dict) else items
        first = islice(values, MAX_ITEMS_WITHOUT_TENSOR)
        return len(items) > MAX_ITEMS_WITHOUT_TENSOR and not any(map(self._has_leaf, first))

    def _has_leaf(self, value: Any) -> bool:
        found: list[Any] = []
        _Copier(self._leaf, found.append).copy(value)
        return bool(found)

    def _fill(self, copied: Any, value: Any, attributes: dict[str, Any]) -> None:
        """Copy items, and attributes where they are kept: past properties and frozen classes."""
        if isinstance(value, list):
            copied[:] = [self.copy(item) for item in value]
        elif isinstance(value, dict):
            for key, item in value.items():
                copied[key] = self.copy(item)
        for name, item in list(attributes.items()):
            vars(copied)[name] = self.copy(item)
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            if field.name not in attributes and hasattr(value, field.name):  # set, in a slot
                item = self.copy(getattr(value, field.name))
                object.__setattr__(copied, field.name, item)


def _is_nest(value: Any) -> bool:
    """Return whether this is a container, or an object whose attributes a forward may change."""
    if isinstance(value, type) or hasattr(type(value), "__del__"):  # which a copy would run, too
        return False
    if type(value) is list or isinstance(value, tuple | dict) or dataclasses.is_dataclass(value):
        return True
    return hasattr(value, "__dict__") and not callable(value) and is_users_class(type(value))
