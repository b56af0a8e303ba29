"""What is in containers and in objects of the user's own: kept, put back, compared, altered."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator
from math import inf
from typing import Any

import torch

from .arguments import is_helper, put_tensors, take_tensors

CONTAINERS = (list, dict, set, deque, OrderedDict)

DEEPEST = 4
"""Levels of containers and objects within an attribute that are looked into."""


def contents(
    value: Any, depth: int = DEEPEST, known: set[int] | None = None, most: float = inf
) -> Iterator[tuple[Any, Any]]:
    """Containers, and the attributes of helper objects, with a copy of what is in each.

    Those with more members than `most` are passed over.
    """
    known = set() if known is None else known
    if not depth or id(value) in known:
        return
    if type(value) not in CONTAINERS and not is_helper(value):
        return
    known.add(id(value))
    held = vars(value) if is_helper(value) else value
    if len(held) > most:
        return
    yield held, copy.copy(held)
    for inner in list(held.values() if isinstance(held, dict) else held):
        yield from contents(inner, depth - 1, known, most)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The value, if it is a tensor, or the tensors in such containers and objects."""
    if isinstance(value, torch.Tensor):
        yield value
    for _, kept in contents(value):
        inner = kept.values() if isinstance(kept, dict) else kept
        yield from (each for each in inner if isinstance(each, torch.Tensor))


def refill(container: Any, then: Any) -> None:
    """In place: hooks and closures may hold the same container."""
    container.clear()
    if hasattr(container, "update"):
        container.update(then)
    else:
        container.extend(then)


def has_the_same(container: Any, then: Any) -> bool:
    """The very same things in it, in their order; values need not compare."""
    if isinstance(container, dict):
        same_keys = list(container) == list(then)
        return same_keys and has_the_same(list(container.values()), list(then.values()))
    return len(container) == len(then) and all(
        one is other for one, other in zip(container, then, strict=True)
    )


def has_tensors(value: Any) -> bool:
    """Whether there are tensors in an attribute's value, at any depth."""
    return bool(take_tensors(value)[0])


def altered(value: Any) -> Any:
    """A copy of such a value whose tensors are others, of the same shapes and types."""
    tensors, nest = take_tensors(value)
    plain = [tensor.detach() for tensor in tensors]
    return put_tensors(nest, tuple(~t if t.dtype == torch.bool else t + 1 for t in plain))
