"""Tensors come out of any nest of arguments and go back to where they were."""

from __future__ import annotations

import logging
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

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
def test_there_and_back(tensor_tree: Any, value: Any) -> None:
    tensors, nest = tensor_tree.take_tensors(value)
    again, _ = tensor_tree.take_tensors(tensor_tree.put_tensors(nest, tuple(tensors)))
    assert all(one is other for one, other in zip(tensors, again, strict=True))
    assert "tensor(" not in repr(nest), "none is left behind"
    assert type(tensor_tree.put_tensors(nest, tuple(tensors))) is type(value)


class Cache:
    """As key-value caches are: tensors in lists, and a way back to itself."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.layers = list(tensors)
        self.owner = self


def test_an_object_is_copied_once_with_all_that_is_in_it(tensor_tree: Any) -> None:
    cache = Cache(torch.zeros(1), torch.ones(1))
    tensors, nest = tensor_tree.take_tensors((cache, {"again": cache}))
    assert len(tensors) == 2
    one, others = tensor_tree.put_tensors(nest, tuple(tensors))
    assert one is others["again"] is one.owner is not cache
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
def test_what_has_no_copy_is_handed_on(tensor_tree: Any, value: Any) -> None:
    tensors, nest = tensor_tree.take_tensors([value])
    assert tensor_tree.put_tensors(nest, tuple(tensors))[0] is value
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


def test_attributes_are_taken_from_where_they_are_kept(tensor_tree: Any) -> None:
    tensors, nest = tensor_tree.take_tensors([Guarded(), Slotted(torch.zeros(1))])
    assert len(tensors) == 3
    guarded, slotted = tensor_tree.put_tensors(nest, tuple(tensor + 1 for tensor in tensors))
    assert [float(layer) for layer in guarded.layers] == [1, 2]
    assert float(slotted.tensor) == 1


class Helper:
    """Data of the user's own, beside a cache that a forward fills."""

    def __init__(self, words: Any) -> None:
        self.words, self.cache = words, [torch.zeros(1)]


@pytest.mark.parametrize("many", [list, tuple, lambda words: dict(enumerate(words))])
def test_much_data_is_not_looked_through(tensor_tree: Any, many: Any) -> None:
    words = many([Mutable(None) for _ in range(1000)])  # type: ignore[arg-type]  # no tensor
    helper = Helper(words)
    tensors, nest = tensor_tree.take_tensors(helper)
    again = tensor_tree.put_tensors(nest, tuple(tensors))
    assert len(tensors) == 1
    assert again.cache is not helper.cache
    first, copied = (
        next(iter(w.values() if isinstance(w, dict) else w)) for w in (words, again.words)
    )
    assert copied is first, "its items are shared"
    if not isinstance(words, tuple):
        assert again.words is not words, "what a forward adds to it is added to a copy"


def test_many_tensors_are_all_taken(tensor_tree: Any) -> None:
    layers = [(torch.zeros(1), None) for _ in range(2000)]
    value = {"layers": layers[:1000], "named": dict(enumerate(layers[1000:]))}
    assert len(tensor_tree.take_tensors(value)[0]) == 2000
