"""Which units are found in which models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Find = Callable[[nn.Module, torch.Tensor], Any]


@pytest.fixture
def find(part: Callable[[str], Any], record: Callable[..., Any]) -> Find:
    """The candidates of a model."""

    def run(model: nn.Module, batch: torch.Tensor) -> Any:
        recorder = record(model, batch, keep=False)
        return part("units").find_candidates(
            model,
            recorder.timeline(),
            recorder.checkpointing,
            recorder.around_checkpoints,
            recorder.overwritten,
        )

    return run


def test_blocks_and_their_parts(find: Find) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.mix(torch.exp(x))) + x

    units = find(nn.Sequential(*(Block() for _ in range(3))), torch.randn(4, 16)).units
    assert {"0", "1", "2", "0.mix", "1.mix", "2.mix"} <= set(units)
    assert "0.mix.0" not in units, "a lone layer saves what it is given"


def test_no_unit_begins_by_changing_its_input(find: Find) -> None:
    class Block(nn.Sequential):
        def __init__(self) -> None:
            layers = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
            super().__init__(nn.SiLU(inplace=True), *layers)

    plain = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(inplace=True)) * 2)
    found = find(nn.Sequential(plain, Block(), Block()), torch.randn(2, 4, 8, 8))
    assert found.units
    assert not [unit for unit in found.units if unit.startswith(("1", "2"))]
    assert {"1", "2"} <= set(found.left_out)


def test_a_scripted_module_is_let_alone(find: Find) -> None:
    inner = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
    trace: Any = torch.jit.trace
    scripted = trace(inner, torch.randn(4, 16))
    units = find(nn.Sequential(nn.Linear(16, 16), scripted), torch.randn(4, 16)).units
    assert not [unit for unit in units if unit.startswith("1")]
