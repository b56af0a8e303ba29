"""Which live objects have a state: tensors, modules, optimizers and what hangs on them.

A walk visits every tensor, container and stateful object that can be reached from a module or an
optimizer through attributes, containers, gradients and tensor attributes, each once. Objects of
classes it does not know (a user's own helper behind an attribute) are kept as they are and not
entered.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType
from typing import Any, Protocol, TypeGuard

import torch

# What a function may bind anew, and what it may put into a container: kept, and put back.
#
# A `Cell` is a variable of an enclosing function, a `Name` a global; `Members` is a container of
# which only the members themselves count, not what they hold.

_UNBOUND = object()


@dataclass(frozen=True, eq=False)
class Cell:
    """A variable that closures share."""

    cell: CellType

    @property
    def value(self) -> object:
        """What it is bound to."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return _UNBOUND

    def bind(self, value: object) -> None:
        """Bind it to `value`, or to nothing."""
        if value is _UNBOUND:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


@dataclass(frozen=True, eq=False)
class Name:
    """A global variable."""

    namespace: dict[str, Any]
    name: str

    @property
    def value(self) -> object:
        """What it is bound to."""
        return self.namespace.get(self.name, _UNBOUND)

    def bind(self, value: object) -> None:
        """Bind it to `value`, or to nothing."""
        if value is _UNBOUND:
            del self.namespace[self.name]
        else:
            self.namespace[self.name] = value


@dataclass(frozen=True, eq=False)
class Members:
    """A container whose members are not looked into."""

    container: Any


class BindingRecord:
    """What a cell or a name was bound to."""

    def __init__(self, binding: Cell | Name) -> None:
        self._binding = binding
        self._value = binding.value

    def restore(self) -> None:
        """Bind it as it was."""
        if self._binding.value is not self._value:
            self._binding.bind(self._value)


# The state of one object as it was recorded, and the way back to it.
#
# What is put back keeps its identity: tensors get their storage, values, gradient and flags back,
# containers and `__dict__`s their entries in their order, objects their class.

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


_ENTERED = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
_PLUMBING = ("._parameters", "._buffers", "._modules")


def walk(root: object, name: str) -> Iterator[tuple[str, object]]:
    """Everything with a state that can be reached from `root`, and a name that says where it is."""
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([(name, root)])
    while waiting:
        place, node = waiting.popleft()
        if id(node) in seen or not has_state(node):
            continue
        seen.add(id(node))
        yield place, node
        waiting.extend(_children(place, node))


def is_dict(node: object) -> TypeGuard[dict[Any, Any]]:
    """Whether `node` is a mapping of a known class; a user's own may do anything on `clear`."""
    return type(node) in (dict, OrderedDict, defaultdict)


def is_collection(node: object) -> TypeGuard[list[Any] | deque[Any] | set[Any] | tuple[Any, ...]]:
    """Whether `node` is a collection of a known class."""
    return type(node) in (list, deque, set, tuple)


def has_state(node: object) -> bool:
    """Whether `record` knows how to keep this object, and `walk` enters it."""
    return (
        isinstance(node, (*_ENTERED, torch.Tensor, Cell, Name, Members))
        or is_dict(node)
        or is_collection(node)
        or generator_access(node) is not None
    )


def _children(place: str, node: object) -> Iterator[tuple[str, object]]:
    if isinstance(node, torch.Tensor):
        yield from _tensor_children(place, node)
    elif isinstance(node, _ENTERED):
        yield from ((f"{place}.{key}", value) for key, value in vars(node).items())
    elif is_dict(node):
        yield from _dict_children(place, node)
    elif is_collection(node) and not isinstance(node, set):
        yield from ((f"{place}[{index}]", value) for index, value in enumerate(node))


def _dict_children(place: str, node: dict[Any, Any]) -> Iterator[tuple[str, object]]:
    """Parameters, buffers and submodules are named as the user names them."""
    for plumbing in _PLUMBING:
        place = place.removesuffix(plumbing)
    for index, (key, value) in enumerate(node.items()):
        yield f"{place}.{key}" if isinstance(key, str) else f"{place}[{index}]", value


def _tensor_children(place: str, tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
    yield f"{place}.grad", gradient_of(tensor)
    yield f"{place}.__dict__", vars(tensor)
    for hooks in HOOKS:
        yield f"{place}.{hooks}", getattr(tensor, hooks, None)


def record(node: object) -> Record:
    """The present state of one object that `walk` yielded."""
    if isinstance(node, Cell | Name):
        return BindingRecord(node)
    if isinstance(node, Members):
        return record(node.container)
    if isinstance(node, torch.Tensor):
        return TensorRecord(node)
    if isinstance(node, _ENTERED):
        return ObjectRecord(node)
    if is_dict(node):
        return DictRecord(node)
    if is_collection(node):
        return CollectionRecord(node)
    access = generator_access(node)
    if access is None:
        raise TypeError(f"a {type(node).__name__} has no state that could be recorded")
    return GeneratorRecord(*access)


def generator_access(node: object) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """How to read and write the state of a random number generator object; None: it is none."""
    if isinstance(node, torch.Generator):
        return node.get_state, node.set_state
    if isinstance(node, random.Random):
        return node.getstate, node.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(node, numpy.random.RandomState):
        return node.get_state, node.set_state
    if numpy is not None and isinstance(node, numpy.random.Generator):
        bits = node.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    return None
