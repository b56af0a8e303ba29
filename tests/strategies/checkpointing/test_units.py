"""Which units are found in which models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

units_of = importlib.import_module("autofit.strategies.checkpointing.units")
parse = units_of.Unit.parse
Find = Callable[[nn.Module, torch.Tensor], Any]


@pytest.fixture
def find(record: Callable[..., Any]) -> Find:
    """The timeline of a model's units."""
    return lambda model, x: units_of.find_candidates(model, record(model, x, keep=False))[0]


def test_blocks_and_their_parts(find: Find) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.mix(torch.exp(x))) + x

    units = find(nn.Sequential(*(Block() for _ in range(3))), torch.randn(4, 16)).calls_of
    assert {"0", "1", "2", "0.mix", "1.mix", "2.mix"} <= set(units)
    assert "0.mix.0" not in units, "a lone layer saves what it is given"


def test_runs_of_a_flat_sequential(find: Find) -> None:
    layers = (kind for _ in range(8) for kind in (nn.Linear(16, 16), nn.Tanh()))
    found = find(nn.Sequential(*layers), torch.randn(4, 16))
    runs = [parse(unit).segment for unit in found.calls_of]
    assert len(runs) >= 4
    assert all(run is not None and run[1] - run[0] > 1 for run in runs)
    outermost = units_of.layers(found)[0]
    covered = [i for u in outermost for i in range(*parse(u).segment)]
    assert len(covered) == len(set(covered)) >= 12


def test_each_run_is_offered_once(find: Find) -> None:
    """Where the second half of a run saves nearly all, that half is the run itself."""
    layers = (nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    found = find(nn.Sequential(nn.Linear(16, 16), nn.Sequential(*layers)), torch.randn(4, 16))
    assert [unit for unit in found.calls_of if unit.startswith("1")]
    assert all(len(calls) == 1 for calls in found.calls_of.values())


def test_no_unit_begins_by_changing_its_input(find: Find) -> None:
    model = nn.Sequential(
        *(
            layer
            for _ in range(6)
            for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(inplace=True))
        )
    )
    units = find(model, torch.randn(2, 4, 8, 8)).calls_of
    assert units
    firsts = {parse(unit).modules(model)[0] for unit in units}
    assert not [name for name in firsts if isinstance(model.get_submodule(name), nn.SiLU)]


def test_a_scripted_module_is_let_alone(find: Find) -> None:
    inner = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
    trace: Any = torch.jit.trace
    scripted = trace(inner, torch.randn(4, 16))
    units = find(nn.Sequential(nn.Linear(16, 16), scripted), torch.randn(4, 16)).calls_of
    assert not [unit for unit in units if unit.startswith("1")]
