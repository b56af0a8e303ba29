"""Bytes of an optimizer's state, beside those of the real optimizers that do with less."""

from __future__ import annotations

import importlib.util
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from autofit.prediction.optimizer_state import adafactor_values, bytes_in_8_bits, state_costs
from autofit.probing.prober import Target, open_prober
from autofit.training.workload import Workload

WIDTH, OUT = 96, 64


def make_model() -> nn.Module:
    """A matrix, a convolution and a norm that train, and a matrix that does not."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * WIDTH, OUT), nn.LayerNorm(OUT)
    )
    model.append(nn.Linear(OUT, OUT).requires_grad_(False))
    return model


def costs(optimizer: Any) -> dict[str, Any]:
    workload = Workload(make_model, torch.randn(2, 1, WIDTH), optimizer=optimizer)
    with open_prober(workload, (), Target("cpu", isolation="inprocess")) as prober:
        found: dict[str, Any] = prober.run(state_costs)
    return found


def held_by(make: Any) -> int:
    """Bytes that a real optimizer keeps after a step, counts of steps left out."""
    model = make_model()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    model(torch.randn(2, 1, WIDTH)).square().mean().backward()
    optimizer.step()
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor) and each.dim())


def test_what_a_state_takes_and_what_others_would() -> None:
    trained = [p for p in make_model().parameters() if p.requires_grad]
    whole = sum(parameter.nbytes for parameter in trained)
    found = costs(torch.optim.AdamW)
    assert found["optimizer"] == "AdamW"
    assert found["parameter_bytes"] == found["lion_bytes"] == whole
    assert found["state_bytes"] == held_by(torch.optim.AdamW) == 2 * whole
    assert found["adafactor_bytes"] == held_by(torch.optim.Adafactor)
    matrix = 4 * WIDTH * OUT  # the one tensor that is large enough for codes
    assert found["bytes_in_8_bits"] == 2 * (whole - 4 * matrix + matrix + 4 * matrix // 256)


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
def test_8_bits_are_as_many_as_in_a_real_library() -> None:
    library = import_module("bitsandbytes.optim")
    codes = 2 * 256 * 4  # a table of codes for each moment
    assert held_by(library.AdamW8bit) - codes == costs(torch.optim.AdamW)["bytes_in_8_bits"]


def test_an_optimizer_without_state_and_one_with_one_moment() -> None:
    assert costs(partial(torch.optim.SGD, lr=0.1))["state_bytes"] == 0
    once = costs(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert once["state_bytes"] == once["lion_bytes"]


def test_small_and_whole_numbers_stay_as_they_are() -> None:
    assert bytes_in_8_bits(torch.zeros(4095)) == 4 * 4095
    assert bytes_in_8_bits(torch.zeros(4097)) == 4097 + 4 * 17
    assert bytes_in_8_bits(torch.zeros(5000, dtype=torch.int32)) == 20000
    assert adafactor_values(torch.Size([])) == 1
    assert adafactor_values(torch.Size([3, 4, 5])) == 12 + 15
