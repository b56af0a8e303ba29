"""Takes the tensors out of a call's arguments and puts them back.

`torch.utils.checkpoint` looks after positional tensors alone: it notices when they are changed in
place, and it keeps the random state of their devices. So whatever a module is called with (keyword
arguments, tuples, lists, dicts, dataclasses), its tensors are handed over positionally.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class _Slot:
    index: int


def take_tensors(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors in a nest of containers, and the nest with a mark where each one was."""
    tensors: list[torch.Tensor] = []

    def out(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    return tensors, _rebuilt(value, out)


def put_tensors(nest: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """What `take_tensors` took apart, with these tensors in it and containers of its own."""
    return _rebuilt(nest, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else leaf)


def _rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        items = [_rebuilt(item, leaf) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is list:
        return [_rebuilt(item, leaf) for item in value]
    if isinstance(value, dict):
        return _rebuilt_dict(value, leaf)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | _Slot):
        return _rebuilt_dataclass(value, leaf)
    return leaf(value)


def _rebuilt_dict(value: dict[Any, Any], leaf: Callable[[Any], Any]) -> Any:
    rebuilt = copy.copy(value)
    for key, item in value.items():
        rebuilt[key] = _rebuilt(item, leaf)
    return rebuilt


def _rebuilt_dataclass(value: Any, leaf: Callable[[Any], Any]) -> Any:
    rebuilt = copy.copy(value)
    for field in dataclasses.fields(value):
        item = _rebuilt(getattr(value, field.name), leaf)
        object.__setattr__(rebuilt, field.name, item)  # a frozen one refuses plain assignment
    return rebuilt
