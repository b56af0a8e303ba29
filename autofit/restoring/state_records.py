"""The state of one object as it was recorded, and the way back to it.

What is put back keeps its identity: tensors get their storage, values, gradient and flags back,
containers and `__dict__`s their entries in their order, objects their class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes of a tensor that hold what was registered on it."""


class Record(Protocol):
    """The state of one object, and the way back to it."""

    def restore(self) -> None:
        """Put it back in place."""


class TensorRecord:
    """Storage, values, gradient, `requires_grad` and hooks of one tensor.

    The values are kept on the host, so that a snapshot takes no device memory; the storage itself
    is kept too, because views of it that the user holds must stay views.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._class = type(tensor)
        self._alias = tensor.data
        self._storage_bytes = _storage_bytes(self._alias)
        self._cells = _cells(self._alias)
        self._values = self._cells.to("cpu", copy=True) if has_values(self._alias) else None
        self._gradient = gradient_of(tensor)
        self._requires_grad = tensor.requires_grad
        self._hooks = {name: getattr(tensor, name, None) for name in HOOKS}

    def restore(self) -> None:
        tensor = self._tensor
        if type(tensor) is not self._class:
            tensor.__class__ = self._class
        if self._storage_bytes != _storage_bytes(self._alias):
            self._alias.untyped_storage().resize_(self._storage_bytes)
        if placement(tensor) != placement(self._alias):
            tensor.data = self._alias
        if self._values is not None:
            with torch.inference_mode(self._alias.is_inference()), torch.no_grad():
                self._cells.copy_(self._values)
        if tensor.is_leaf:
            if tensor.requires_grad != self._requires_grad:
                tensor.requires_grad = self._requires_grad
            if tensor.grad is not self._gradient:
                tensor.grad = self._gradient
        for name, hooks in self._hooks.items():
            if getattr(tensor, name, None) is not hooks:
                setattr(tensor, name, hooks)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a leaf; others warn when asked, and have none."""
    return tensor.grad if tensor.is_leaf else None


def has_values(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind the tensor: none on meta, nor where its storage was freed."""
    freed = tensor.layout == torch.strided and tensor.numel() > 0 and not _storage_bytes(tensor)
    return not tensor.is_meta and not freed


def placement(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor's values lie and how; equal for two names of the same memory."""
    plain = tensor.data  # a lazy module's parameter answers nothing about itself
    if plain.layout != torch.strided:
        return plain.device, plain.dtype, plain.layout, tuple(plain.shape)
    where = plain.data_ptr() if has_values(plain) else 0
    return plain.device, plain.dtype, tuple(plain.shape), plain.stride(), where


def _cells(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each memory cell once: what `expand` repeats cannot be written as it is."""
    if tensor.layout != torch.strided:
        return tensor
    for dimension, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0


class ObjectRecord:
    """Class and `__dict__` of one module, optimizer, scheduler or scaler."""

    def __init__(self, node: object) -> None:
        self._node = node
        self._class = type(node)
        self._attributes = dict(vars(node))

    def restore(self) -> None:
        if type(self._node) is not self._class:
            self._node.__class__ = self._class
        _put_back(vars(self._node), self._attributes)


class DictRecord:
    """Entries of a dictionary, in their order."""

    def __init__(self, node: dict[Any, Any]) -> None:
        self._node = node
        self._entries = dict(node)

    def restore(self) -> None:
        _put_back(self._node, self._entries)


class CollectionRecord:
    """Members of a list, deque or set; a tuple cannot change."""

    def __init__(self, node: list[Any] | deque[Any] | set[Any] | tuple[Any, ...]) -> None:
        self._node = node
        self._members = tuple(node)

    def restore(self) -> None:
        node = self._node
        if isinstance(node, tuple) or _same(tuple(node), self._members):
            return
        node.clear()
        if isinstance(node, set):
            node.update(self._members)
        else:
            node.extend(self._members)


class GeneratorRecord:
    """The state of a random number generator, from and to the functions that access it."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._state = read()
        self._write = write

    def restore(self) -> None:
        self._write(self._state)


def _put_back(live: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Give `live` exactly those entries, in their order; untouched where it has them."""
    if _same(tuple(live), tuple(entries)) and _same(tuple(live.values()), tuple(entries.values())):
        return
    live.clear()
    live.update(entries)


def _same(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    return [id(each) for each in these] == [id(each) for each in those]
