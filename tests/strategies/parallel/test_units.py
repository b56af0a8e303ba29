"""Which modules a sharded model is gathered by."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from torch import nn

units: Any = import_module("autofit.strategies.parallel_wrapping")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Tied(nn.Module):
    def __init__(self, *, between_blocks: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        if between_blocks:
            self.blocks[1].weight = self.blocks[0].weight


def _twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (
            nn.ModuleDict({"stem": nn.Linear(4, 4), "body": nn.ModuleList([Block(), Block()])}),
            ["body.0", "body.1"],
        ),
        (nn.Sequential(Block(), nn.GELU(), nn.LayerNorm(4)), ["0.mlp.0", "0.mlp.2"]),
        (
            nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)),
            ["0.0", "0.1", "1.0", "1.1"],
        ),
        (nn.Sequential(nn.GELU(), nn.GELU(), nn.Linear(2, 2)), []),
        (nn.Linear(3, 3), []),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), []),
        (Tied(between_blocks=False), ["blocks.0", "blocks.1", "blocks.2"]),
        (Tied(between_blocks=True), ["blocks.2"]),
        (_twice(), ["0", "3"]),
    ],
    ids=[
        "children of a list, and nothing in them",
        "what is in a child that is alone of its class",
        "what is in lists in lists, since torch shards none",
        "none without parameters",
        "none of one layer",
        "none without repeats",
        "tied parameters outside of the units change nothing",
        "those that share a parameter are left to the model",
        "one that is listed twice is one",
    ],
)
def test_the_units_of_a_model(model: nn.Module, found: list[str]) -> None:
    assert units.units_of(model) == found
