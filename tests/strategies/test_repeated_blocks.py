"""What a step shows of its model: blocks that repeat, of which kinds, and their share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autofit.testing import PlainContext
from autofit.training.workload import Workload

observe = importlib.import_module("autofit.strategies.repeated_blocks").observe


def block(width: int = 8, inner: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def applied(x: Tensor, blocks: Any, *given: Any, **named: Any) -> Tensor:
    """Call blocks one after another."""
    for each in blocks:
        x = each(x, *given, **named)
    return x


class Stages(nn.Module):
    """Two stages of blocks of two kinds, a block of its own, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(block() for _ in range(3))
        self.second = nn.Sequential(*(block(inner=32) for _ in range(2)))
        self.alone, self.unused = block(inner=64), nn.ModuleList(block() for _ in range(2))
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        changed = self.layers(self.alone(self.second(applied(x, self.first))))
        return changed.square().mean()


class Body(nn.Module):
    """Calls its blocks in turn, and some again."""

    def __init__(self, *blocks: nn.Module, again: int = 0) -> None:
        super().__init__()
        self.body, self.again = nn.ModuleList(blocks), again

    def forward(self, x: Tensor) -> Tensor:
        return applied(x, [*self.body, *self.body[: self.again]]).square().mean()


def nested() -> nn.Module:
    """Blocks that hold blocks: the outermost ones count."""
    return Body(*(nn.Sequential(block(), block()) for _ in range(2)))


def alone() -> nn.Module:
    """Two blocks whose parameters have other shapes, and one that is called twice."""
    return Body(block(inner=16), block(inner=32), again=1)


class Given(nn.Module):
    """A block that is given something besides."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.mlp = block(inner=inner)

    def forward(self, x: Tensor, given: Any, flag: bool = False) -> Tensor:
        return self.mlp(x)


class Cache:
    """Grows with each block that it is given to."""


class Caching(nn.Module):
    """Its first blocks are given a cache, its second ones a mask and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Given(16) for _ in range(2))
        self.second = nn.ModuleList(Given(32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = applied(x, self.first, given=Cache())
        mask = torch.ones_like(x), {"scale": 1.0}
        return applied(x, self.second, mask, flag=True).square().mean()


def seen(make: Callable[[], nn.Module]) -> Any:
    context = PlainContext(lambda: Workload(make(), torch.randn(4, 8)))
    return context.with_training(observe, 2)


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (Stages, [["first.0", "first.1", "first.2"], ["second.0", "second.1"]]),
        (nested, [["body.0", "body.1"]]),
        (alone, []),
        (block, []),
    ],
)
def test_blocks_of_a_kind_are_found_by_structure(
    make: Callable[[], nn.Module], blocks: list[list[str]]
) -> None:
    found = seen(make)
    assert found.blocks == blocks
    assert found.calls_model


def test_blocks_that_are_given_an_object_are_left_out_by_its_class() -> None:
    found = seen(Caching)
    assert found.blocks == [["second.0", "second.1"]]
    assert found.objects == ["Cache"]
    assert seen(Stages).objects == []


def test_the_share_is_that_of_one_block_of_each_kind() -> None:
    assert seen(alone).share_of_blocks == 0
    assert 0.45 < seen(nested).share_of_blocks < 0.5  # of two, beside the loss
    assert 0 < seen(Stages).share_of_blocks < 0.6


def test_looking_leaves_the_model_as_it_was() -> None:
    model = Stages()
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    PlainContext(lambda: Workload(model, torch.randn(4, 8))).with_training(observe, 2)
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == before
