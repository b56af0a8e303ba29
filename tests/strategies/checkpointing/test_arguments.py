"""Tensors come out of any nest of arguments and go back to where they were."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

Named = namedtuple("Named", ["first", "second"])


@dataclass
class Mutable:
    tensor: torch.Tensor
    count: int = 3


@dataclass(frozen=True)
class Frozen:
    inner: Mutable
    nothing: None = None


def _nests() -> list[Any]:
    a, b = torch.zeros(1), torch.ones(2)
    return [
        a,
        None,
        (a, [b, {"key": a, "text": "x"}], 5),
        Named(a, (b,)),
        OrderedDict(one=a, two=[b]),
        Frozen(Mutable(a)),
        ((Frozen(Mutable(b)),), {"mask": None, "options": {"scale": a}}),
    ]


@pytest.mark.parametrize("value", _nests(), ids=lambda value: type(value).__name__)
def test_there_and_back(part: Callable[[str], Any], value: Any) -> None:
    arguments = part("arguments")
    tensors, nest = arguments.take_tensors(value)
    again, _ = arguments.take_tensors(arguments.put_tensors(nest, tuple(tensors)))
    assert all(one is other for one, other in zip(tensors, again, strict=True))
    assert "tensor(" not in repr(nest), "none is left behind"
    assert type(arguments.put_tensors(nest, tuple(tensors))) is type(value)


def test_containers_are_new_each_time(part: Callable[[str], Any]) -> None:
    """So a module that appends to a list it was given finds it short again in the second run."""
    arguments = part("arguments")
    given = [torch.zeros(1)]
    tensors, nest = arguments.take_tensors((given,))
    (first,) = arguments.put_tensors(nest, tuple(tensors))
    first.append(None)
    (second,) = arguments.put_tensors(nest, tuple(tensors))
    assert len(second) == len(given) == 1


def test_the_users_own_dataclass_is_not_changed(part: Callable[[str], Any]) -> None:
    value = Mutable(torch.zeros(1))
    before = value.tensor
    part("arguments").take_tensors((value,))
    assert value.tensor is before


class Cache:
    """As key-value caches are: tensors in lists, and a way back to itself."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.layers = list(tensors)
        self.owner = self


def test_an_object_is_copied_once_with_all_that_is_in_it(part: Callable[[str], Any]) -> None:
    arguments = part("arguments")
    cache = Cache(torch.zeros(1), torch.ones(1))
    tensors, nest = arguments.take_tensors((cache, {"again": cache}))
    assert len(tensors) == 2
    one, others = arguments.put_tensors(nest, tuple(tensors))
    assert one is others["again"] is one.owner is not cache
    one.layers.append(torch.zeros(1))
    assert all(map(torch.equal, cache.layers, tensors))
    assert len(cache.layers) == 2


class Shared(Enum):
    ONE = 1


class RefusesToBeCopied:
    def __copy__(self) -> RefusesToBeCopied:
        raise TypeError("cannot be copied")


@pytest.mark.parametrize("value", [Shared.ONE, RefusesToBeCopied(), nn.Linear(1, 1), Cache])
def test_what_has_no_copy_is_handed_on(part: Callable[[str], Any], value: Any) -> None:
    arguments = part("arguments")
    tensors, nest = arguments.take_tensors([value])
    assert tensors == []
    assert arguments.put_tensors(nest, ())[0] is value
