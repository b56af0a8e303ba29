"""Tensors come out of any nest of arguments and go back to where they were."""

from __future__ import annotations

import importlib
import logging
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

tree = importlib.import_module("autofit.strategies.checkpointing.tensor_tree")
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
def test_there_and_back(value: Any) -> None:
    tensors, nest = tree.take_tensors(value)
    again, _ = tree.take_tensors(tree.put_tensors(nest, tuple(tensors)))
    assert all(one is other for one, other in zip(tensors, again, strict=True))
    assert "tensor(" not in repr(nest), "none is left behind"
    assert type(tree.put_tensors(nest, tuple(tensors))) is type(value)


class Cache:
    """As key-value caches are: tensors in lists, and a way back to itself; and much data."""

    def __init__(self, *tensors: torch.Tensor, words: Any = ()) -> None:
        self.layers = list(tensors)
        self.owner, self.words = self, words


def test_what_is_given_twice_is_copied_once_with_all_that_is_in_it() -> None:
    cache = Cache(torch.zeros(1), torch.ones(1))
    cycle: list[Any] = [cache.layers[0]]
    cycle.append(cycle)
    tensors, nest = tree.take_tensors((cache, {"again": cache}, cycle, [cycle]))
    assert len(tensors) == 2
    one, others, again, (inner,) = tree.put_tensors(nest, tuple(tensors))
    assert one is others["again"] is one.owner is not cache
    assert again is inner is again[1] is not cycle
    one.layers.append(torch.zeros(1))
    assert all(map(torch.equal, cache.layers, tensors))
    assert len(cache.layers) == 2


class Shared(Enum):
    ONE = 1


class RefusesToBeCopied:
    def __copy__(self) -> RefusesToBeCopied:
        raise TypeError("cannot be copied")


class ReadOnly(dict[str, torch.Tensor]):
    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        raise TypeError("read only")


class Closes:
    """What it holds is closed when an object of it goes."""

    closed: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.held = torch.zeros(1)

    def __del__(self) -> None:
        self.closed.append(id(self))


class Process:
    """All objects of it are one."""

    def __new__(cls) -> Process:
        process = super().__new__(cls)
        process.__dict__ = cls.shared
        return process

    shared: ClassVar[dict[str, Any]] = {"held": torch.zeros(1)}


UNCOPIED = [
    Shared.ONE,
    RefusesToBeCopied(),
    nn.Linear(1, 1),
    Cache,
    ReadOnly(one=torch.zeros(1)),
    Closes(),
    Process(),
    logging.getLogger("of.a.model"),
]


@pytest.mark.parametrize("value", UNCOPIED)
def test_what_has_no_copy_is_handed_on(value: Any) -> None:
    tensors, nest = tree.take_tensors([value])
    assert tree.put_tensors(nest, tuple(tensors))[0] is value
    assert not Closes.closed


class Guarded:
    """Its tensors stand behind a property that cannot be set and gives another list each time."""

    def __init__(self) -> None:
        vars(self)["layers"] = [torch.zeros(1), torch.ones(1)]

    @property
    def layers(self) -> list[torch.Tensor]:
        return list(vars(self)["layers"])


@dataclass(slots=True)
class Slotted:
    """One of its fields is set later."""

    tensor: torch.Tensor
    later: torch.Tensor = field(init=False)


def test_attributes_are_taken_from_where_they_are_kept() -> None:
    tensors, nest = tree.take_tensors([Guarded(), Slotted(torch.zeros(1))])
    assert len(tensors) == 3
    guarded, slotted = tree.put_tensors(nest, tuple(tensor + 1 for tensor in tensors))
    assert [float(layer) for layer in (*guarded.layers, slotted.tensor)] == [1, 2, 1]


def _first(words: Any) -> Any:
    return next(iter(words.values() if isinstance(words, dict) else words))


@pytest.mark.parametrize("many", [list, tuple, lambda words: dict(enumerate(words))])
def test_much_data_is_not_looked_through(many: Any) -> None:
    """What a forward adds to it is added to a copy, and its items are shared."""
    cache = Cache(torch.zeros(1), words=many([Mutable(None) for _ in range(1000)]))  # type: ignore[arg-type]  # no tensor
    tensors, nest = tree.take_tensors(cache)
    again = tree.put_tensors(nest, tuple(tensors))
    assert len(tensors) == 1
    assert again.layers is not cache.layers
    assert _first(again.words) is _first(cache.words)
    assert (again.words is cache.words) == isinstance(cache.words, tuple)


@pytest.mark.parametrize("kind", [list, tuple, lambda many: dict(enumerate(many))])
def test_many_tensors_are_all_put_back(kind: Any) -> None:
    value = kind([torch.full((1,), float(n)) for n in range(70)])
    tensors, nest = tree.take_tensors(value)
    assert str(tree.put_tensors(nest, tuple(2 * each for each in tensors))) == str(
        kind([torch.full((1,), 2.0 * n) for n in range(70)])
    )


def test_many_tensors_are_all_taken() -> None:
    layers = [(torch.zeros(1), None) for _ in range(2000)]
    value = {"layers": layers[:1000], "named": dict(enumerate(layers[1000:]))}
    assert len(tree.take_tensors(value)[0]) == 2000
