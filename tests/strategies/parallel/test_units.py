"""Which modules a sharded model is gathered by."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

units: Any = import_module("autofit.strategies.parallel.wrapping")


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


def test_repeated_children_of_lists_are_units_and_what_is_in_them_is_not() -> None:
    model = nn.ModuleDict({"stem": nn.Linear(4, 4), "body": nn.ModuleList([Block(), Block()])})
    assert units.units_of(model) == ["body.0", "body.1"]


def test_a_child_that_is_alone_of_its_class_is_looked_into() -> None:
    model = nn.Sequential(Block(), nn.GELU(), nn.LayerNorm(4))
    assert units.units_of(model) == ["0.mlp.0", "0.mlp.2"]


def test_lists_in_lists_are_looked_into_since_torch_shards_none() -> None:
    model = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
    assert units.units_of(model) == ["0.0", "0.1", "1.0", "1.1"]


def test_modules_without_parameters_are_no_units() -> None:
    assert units.units_of(nn.Sequential(nn.GELU(), nn.GELU(), nn.Linear(2, 2))) == []


def test_a_model_without_repeats_has_no_units() -> None:
    assert units.units_of(nn.Linear(3, 3)) == []
    assert units.units_of(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))) == []


def test_tied_parameters_outside_of_the_units_change_nothing() -> None:
    assert units.units_of(Tied(between_blocks=False)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_modules_that_share_a_parameter_are_left_to_the_model() -> None:
    assert units.units_of(Tied(between_blocks=True)) == ["blocks.2"]


def test_a_module_that_is_listed_twice_is_one_unit() -> None:
    twice = nn.Linear(3, 3)
    assert units.units_of(nn.Sequential(twice, nn.ReLU(), twice, nn.Linear(3, 3))) == ["0", "3"]
