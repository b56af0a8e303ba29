"""Placements of recomputation on a machine without the GPU, with no search's report."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.equivalence.steps import PlainContext
from autofit.errors import InvalidArgument
from autofit.registry import load_strategies
from tests.command_line import run_here

LEVEL = "checkpointing.level"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(6))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


WORKLOAD = autofit.Workload(Net, torch.randn(64, 128, 32), loss_fn=mean_square)


@functools.cache
def predicted(level: int, gpu: Any = "L4", **more: Any) -> Any:
    return autofit.predict(WORKLOAD, plan=WORKLOAD.plan(settings={LEVEL: level}, **more), gpu=gpu)


@functools.cache
def most() -> int:
    """Return the last level."""
    with pytest.raises(InvalidArgument, match=r"choose one of \[0, 1, ") as refused:
        predicted(1000)
    return int(str(refused.value).rpartition(" ")[2].rstrip("]"))


def test_further_levels_hold_less_and_the_first_is_plain_training() -> None:
    plain = autofit.predict(WORKLOAD, gpu="L4")
    assert predicted(0).required_bytes == plain.required_bytes
    last = most()
    levels = [predicted(level) for level in (0, last // 3, 2 * last // 3, last)]
    activations = [each.breakdown["activations"] for each in levels]
    assert activations == sorted(activations, reverse=True)
    assert activations[-1] < 0.5 * activations[0]
    assert levels[-1].required_bytes < plain.required_bytes
    assert all(each.breakdown["weights"] == plain.breakdown["weights"] for each in levels)


def test_the_last_level_is_the_placement_that_a_search_measures() -> None:
    """The least that can be held follows from bytes alone, and not from times."""
    (strategy,) = (each for each in load_strategies() if each.name == "checkpointing")
    measured = strategy.dimensions(PlainContext(lambda: WORKLOAD))[LEVEL]
    units = measured.payloads[measured.values[-1]]["units"]
    found = predicted(most())._resolved.payloads[LEVEL]["units"]
    assert units
    assert found == units


def test_a_level_of_a_search_and_its_placement_by_hand_need_the_same() -> None:
    """A user who checkpoints the same blocks himself holds as much."""
    level = most()
    units = predicted(level)._resolved.payloads[LEVEL]["units"]

    class ByHand(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                if f"blocks.{number}" in units:
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
            return self.head(x)

    assert all(unit.count(".") == 1 and unit[-1].isdigit() for unit in units)
    by_hand = autofit.Workload(ByHand, WORKLOAD.sample_batch, loss_fn=mean_square)
    plain = autofit.predict(by_hand, gpu="L4")
    assert predicted(level).peak_allocated_bytes == plain.peak_allocated_bytes


def test_a_level_means_the_same_modules_on_each_gpu() -> None:
    plan = WORKLOAD.plan(settings={LEVEL: 3})
    table = autofit.predict(WORKLOAD, plan=plan, gpu=["T4", "L4", "8GiB"])
    placements = [each._resolved.payloads for each in table.predictions.values()]
    assert len(placements) == 3
    assert placements[0][LEVEL]["units"]
    assert placements[1:] == placements[:-1]
    for gpu in ("T4", "L4"):
        assert table.predictions[gpu].required_bytes == predicted(3, gpu).required_bytes


def test_the_answer_says_that_the_placement_was_computed() -> None:
    (note,) = predicted(1).notes
    assert LEVEL in note
    assert "search" in note
    assert predicted(0).notes == ()
    assert f"0 to {most()}" in note


def test_levels_of_several_ranks_are_predicted_too() -> None:
    two = predicted(3, ranks=2)
    assert two.plan.ranks == 2
    assert two.breakdown["activations"] < predicted(0, ranks=2).breakdown["activations"]


def test_the_commands_take_a_level(tmp_path: Any) -> None:
    path = tmp_path / "placed_workload.py"
    path.write_text("from tests.prediction.test_predicted_placements import WORKLOAD as made\n")
    for command in ("predict", "check"):
        ran = run_here(command, f"{path}:made", "--gpu", "L4", "--set", f"{LEVEL}=3")
        assert ran.code == 0, ran.err
        assert f"{LEVEL}=3" in ran.out
