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
from typing import Any, TypeGuard

import torch

from autofit.restoring.bindings import BindingRecord, Cell, Members, Name
from autofit.restoring.state_records import (
    HOOKS,
    CollectionRecord,
    DictRecord,
    GeneratorRecord,
    ObjectRecord,
    Record,
    TensorRecord,
    gradient_of,
)

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
