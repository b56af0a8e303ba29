"""`autofit.checkpoint_to_budget` as a user calls it: real trainings on the CPU device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.devices.cpu import CpuDevice
from autofit.units import MIB

SETTING = "checkpointing.level"
SAMPLES = torch.Generator().manual_seed(1)
BATCH = (torch.randn(2048, 64, generator=SAMPLES), torch.zeros(2048, dtype=torch.long))
HERE: dict[str, Any] = {"criterion": nn.CrossEntropyLoss(), "device": "cpu"}


def deep() -> nn.Sequential:
    """A model whose activations take about 50 MiB, most of them in its blocks."""
    torch.manual_seed(0)
    block = [nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64), nn.Tanh()]
    blocks = [nn.Sequential(*block) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    HERE["criterion"](model(BATCH[0]), BATCH[1]).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def peak_bytes(model: nn.Module) -> int:
    """What some steps of the user's own loop hold, by the simulated allocator."""
    device = CpuDevice()
    with device.accounting():
        placed = device.place_model(model)
        inputs, targets = (device.place(tensor) for tensor in BATCH)
        optimizer = torch.optim.AdamW(placed.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            HERE["criterion"](placed(inputs), targets).backward()
            optimizer.step()
        return device.read().peak_reserved_bytes


@pytest.mark.slow
def test_the_users_own_loop_holds_less_and_learns_the_same() -> None:
    model = deep()
    plain, before = gradients(model), model.state_dict()
    random = torch.get_rng_state()
    free: Any = autofit.probe(
        autofit.Workload(deep, BATCH, criterion=HERE["criterion"]), device="cpu"
    )
    budget = int(0.7 * free.measurement.held_bytes)
    context: Any = autofit.checkpoint_to_budget(model, BATCH, budget, **HERE)
    assert torch.equal(torch.get_rng_state(), random)
    with context as trial:
        assert trial.plan.settings[SETTING] != 0
        assert trial.measurement.held_bytes <= budget
        for ours, theirs in zip(gradients(model), plain, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert peak_bytes(model) <= budget
    assert peak_bytes(model) > budget
    assert "forward" not in {name for module in model.modules() for name in vars(module)}
    assert all(
        value is before[name] or torch.equal(value, before[name]) for name, value in before.items()
    )


@pytest.mark.slow
def test_no_more_is_recomputed_than_the_budget_asks_for() -> None:
    with autofit.checkpoint_to_budget(deep(), BATCH, "72MiB", **HERE) as trial:
        held: Any = trial.measurement.held_bytes
    # Plain it holds 88 MiB, and with most recomputed 48
    assert 60 * MIB < held <= 72 * MIB


def test_nothing_is_recomputed_where_all_fits() -> None:
    with autofit.checkpoint_to_budget(deep(), BATCH, "400MiB", **HERE) as trial:
        assert trial.plan.settings[SETTING] == 0


def test_a_budget_that_no_placement_fits_is_refused_in_words() -> None:
    with pytest.raises(autofit.NoFeasiblePlan, match=r"least memory.* does not fit") as raised:
        autofit.checkpoint_to_budget(deep(), BATCH, "12MiB", **HERE)
    assert raised.value.allowed_bytes == 12 * MIB
    required = raised.value.required_bytes
    assert required is not None
    assert required > 12 * MIB
    with autofit.checkpoint_to_budget(deep(), BATCH, required, **HERE) as trial:
        assert trial.measurement.held_bytes is not None
        assert trial.measurement.held_bytes <= required


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": deep}, "changes a live model"),
        ({"vram_budget": "8 apples"}, "cannot read '8 apples'"),
        ({"device": "cuda:x"}, "device must be"),
        ({"sample_batch": None}, "give a sample batch"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    asked = {"model": deep(), "sample_batch": BATCH, "vram_budget": "2GiB", **HERE}
    with pytest.raises(autofit.InvalidArgument, match=words):
        autofit.checkpoint_to_budget(**(asked | given))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such layer")


def test_an_error_of_the_forward_is_the_users_own() -> None:
    with pytest.raises(KeyError, match="no such layer"):
        autofit.checkpoint_to_budget(Broken(), BATCH, "1GiB", **HERE)
