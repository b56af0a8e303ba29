"""compile.memory_budget: less is held, gradients stay, and none of torch's settings is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autofit import Plan, Workload
from autofit.devices.cpu import CpuDevice
from autofit.registry import collect_dimensions, load_strategies, resolve
from autofit.space import Space
from autofit.testing import PlainContext
from autofit.training.builder import TrainingBuilder

pytestmark = pytest.mark.slow

SAMPLES = 512
Draw = Callable[[Tensor], Tensor]


def dropped(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5)


def drawn_from_classes(x: Tensor) -> Tensor:
    kept = torch.multinomial(torch.ones(16), 8)
    return x * torch.zeros(16).index_fill(0, kept, 1.0)


def attended(x: Tensor) -> Tensor:
    """Mixed by attention with dropout, whose operator makes several tensors."""
    heads = x.reshape(-1, 2, 8).transpose(0, 1)
    ones = torch.ones_like(heads)
    mixed = functional.scaled_dot_product_attention(ones, ones, heads, dropout_p=0.5)
    return mixed.transpose(0, 1).flatten(1)


class Block(nn.Module):
    """x -> a perceptron without biases, and a draw."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.last(torch.relu(self.first(x))))


BUDGETS: list[float] = []


def total(model: Any, batch: Tensor) -> Tensor:
    """Notes the budget that is in force outside of what is compiled."""
    from torch._functorch import config

    BUDGETS.append(config.activation_memory_budget)
    return model(batch).sum()


def trained(draw: Draw, blocks: int, **settings: Any) -> tuple[nn.Module, Tensor, int]:
    """Return the model with its gradients, the loss, and the peak of a second step."""

    def build() -> Workload:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(draw) for _ in range(blocks)))
        return Workload(model, torch.randn(SAMPLES, 16), loss_fn=total)

    strategies, device = load_strategies(["compile"]), CpuDevice()
    space = Space(collect_dimensions(strategies, PlainContext(build)), SAMPLES)
    resolved = resolve(Plan(SAMPLES, settings=settings), space, strategies)
    workload = build()
    batch = workload.batch(SAMPLES)
    with device.accounting(), TrainingBuilder(build, device, 0).training(workload, resolved) as run:
        run.accumulate(batch)
        run.model.zero_grad()
        before = device.read().allocated_bytes
        device.reset_peaks()
        loss = run.accumulate(batch)
        peak = device.read().peak_allocated_bytes - before
    return run.model, loss, peak


@pytest.mark.parametrize(
    ("draw", "blocks", "budget"),
    [(dropped, 12, 0.05), (attended, 12, 0.05), (drawn_from_classes, 3, 0.5)],
)
def test_what_is_drawn_in_the_forward_holds_in_the_backward(
    draw: Draw, blocks: int, budget: float
) -> None:
    """The output is linear in each layer's weights, so that a gradient tells the masks it used."""
    chosen = {"compile.mode": "default", "compile.memory_budget": budget}
    chosen |= {"compile.region": "blocks"} if blocks == 12 else {}
    model, loss, _ = trained(draw, blocks, **chosen)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert float((parameter.grad * parameter).sum()) == pytest.approx(float(loss), rel=1e-3)


def test_less_is_held_and_no_budget_is_left_in_force() -> None:
    peaks, blocks = [], {"compile.mode": "default", "compile.region": "blocks"}
    for budget in (1.0, 0.05):
        peaks.append(trained(dropped, 12, **blocks, **{"compile.memory_budget": budget})[2])
    assert set(BUDGETS) == {1.0}
    assert peaks[0] > 1.5 * peaks[1], peaks
