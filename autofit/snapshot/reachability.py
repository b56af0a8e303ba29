"""What a user's function can reach: the live objects that calling it may change.

A training in the user's own process changes more than the model it was given: the critic that a
loss closes over, the list that it keeps losses in, the network behind `lambda: network`. They are
found through closures, defaults, `functools.partial`, bound methods and attributes of callable
objects; and through the names of globals, as far as the function's own module goes. Names that a
function binds anew (`nonlocal`, `global`) are found too. Of a global list, dictionary or the like
only the members count, not what they hold: it may be a data set.
"""

from __future__ import annotations

import dis
import functools
import itertools
import random
from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import fields
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from autofit.snapshot.objects import Cell, Members, Name, has_state, is_collection, is_dict
from autofit.training.workload import Workload

_TRAINS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.Generator,
    random.Random,
)
_BINDS_GLOBALS = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_NOT_THE_USERS = {"torch", "autofit", "numpy", "builtins"}


def live_objects(workload: Workload, *, but: Container[str] = ()) -> dict[str, object]:
    """What a training may change: the workload's objects, and what its functions reach.

    Args:
        workload: what is trained.
        but: fields of it to leave out.
    """
    objects: dict[str, object] = {}
    for field in fields(workload):
        if field.name not in but:
            objects |= reachable(getattr(workload, field.name), field.name)
    return objects


def reachable(root: object, name: str) -> dict[str, object]:
    """The objects with a state that `root` is, or that it can reach as a function.

    Args:
        root: anything; what is neither function nor callable object reaches only itself.
        name: how to call it in the keys of the answer.
    """
    found: dict[str, object] = {}
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([(name, root)])
    home = getattr(root, "__module__", None)
    while waiting:
        place, node = waiting.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if has_state(node):
            found[place] = node
        else:
            waiting.extend(_parts(place, node, home))
    return found


def _parts(place: str, node: object, home: str | None) -> Iterator[tuple[str, object]]:
    if isinstance(node, functools.partial):
        yield f"{place}.func", node.func
        yield from _numbered(place, (*node.args, *node.keywords.values()))
    elif isinstance(node, MethodType):
        yield f"{place}.__self__", node.__self__
        yield f"{place}.__func__", node.__func__
    elif isinstance(node, FunctionType):
        yield from _parts_of_function(place, node, home)
    elif callable(node) and not isinstance(node, type) and _is_users(type(node)):
        yield from (
            (f"{place}.{key}", value) for key, value in getattr(node, "__dict__", {}).items()
        )
        yield f"{place}.__call__", type(node).__call__


def _parts_of_function(
    place: str, function: FunctionType, home: str | None
) -> Iterator[tuple[str, object]]:
    if not _is_users(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        bound = Cell(cell)
        yield f"{place}.{name} (name)", bound
        yield f"{place}.{name}", bound.value
    defaults = function.__defaults__ or (), (function.__kwdefaults__ or {}).values()
    yield from _numbered(place, itertools.chain(*defaults))
    if function.__module__ != home:
        return
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, _TRAINS) or _is_trained(value) or isinstance(value, FunctionType):
            yield f"{place}.{name}", value
        elif is_dict(value) or is_collection(value):
            yield f"{place}.{name}", Members(value)
    for name in sorted(_bound_globals(function.__code__)):
        yield f"{place}.{name} (name)", Name(function.__globals__, name)


def _numbered(place: str, values: Iterable[object]) -> Iterator[tuple[str, object]]:
    return ((f"{place}[{index}]", value) for index, value in enumerate(values))


def _is_users(named: Any) -> bool:
    return (named.__module__ or "").partition(".")[0] not in _NOT_THE_USERS


def _is_trained(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _bound_globals(code: CodeType) -> set[str]:
    """The globals that the code binds, functions inside it included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    bound = (each.argval for each in dis.get_instructions(code) if each.opname in _BINDS_GLOBALS)
    return set(bound).union(*(_bound_globals(each) for each in inner))


def _names(code: CodeType) -> set[str]:
    """Every name that the code looks up, functions inside it included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_names(each) for each in inner))
