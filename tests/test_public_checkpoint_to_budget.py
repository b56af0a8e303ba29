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
    loss = HERE["criterion"](model(BATCH[0]), BATCH[1])
    return list(torch.autograd.grad(loss, list(model.parameters())))


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
    plain = gradients(model)
    workload = autofit.Workload(deep, BATCH, criterion=HERE["criterion"])
    free: Any = autofit.probe(workload, device="cpu").measurement.held_bytes
    random = torch.get_rng_state()
    budget = int(0.82 * free)
    context: Any = autofit.checkpoint_to_budget(model, BATCH, budget, **HERE)
    assert torch.equal(torch.get_rng_state(), random)
    with context as trial:
        assert trial.plan.settings[SETTING] != 0
        # Plain it holds 88 MiB, and with most recomputed 48
        assert 0.68 * free < trial.measurement.held_bytes <= budget
        torch.testing.assert_close(gradients(model), plain)
        assert peak_bytes(model) <= budget
    assert peak_bytes(model) > budget
    assert "forward" not in {name for module in model.modules() for name in vars(module)}


def test_nothing_is_recomputed_where_all_fits() -> None:
    with autofit.checkpoint_to_budget(deep(), BATCH, "400MiB", **HERE) as trial:
        assert trial.plan.settings[SETTING] == 0


def test_a_budget_that_no_placement_fits_is_refused_in_words_with_one_that_is_enough() -> None:
    with pytest.raises(autofit.NoFeasiblePlan, match=r"least memory.* does not fit") as raised:
        autofit.checkpoint_to_budget(deep(), BATCH, "12MiB", **HERE)
    assert raised.value.allowed_bytes == 12 * MIB
    enough: Any = raised.value.required_bytes
    with autofit.checkpoint_to_budget(deep(), BATCH, enough, **HERE) as trial:
        assert 12 * MIB < (trial.measurement.held_bytes or 0) <= enough


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
