"""Model FLOPs: torch's own count, less what is computed again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import Target, open_prober
from autofit.probing.profile import _flops_of_a_step, look_at_step
from autofit.training.flops import ModelFlops
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload
from tests.classifier import CROSS_ENTROPY, classifier, labelled

ROWS, WIDTH = 4, 16


class Block(nn.Module):
    """Two products, which may be recomputed in the backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.layers(x)
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


def counted(step: Callable[[], object]) -> float:
    with ModelFlops() as flops:
        step()
    return flops.total


def trained(block: Block) -> None:
    block(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_what_is_recomputed_is_not_counted(reentrant: bool | None) -> None:
    with FlopCounterMode(display=False) as torchs:
        trained(Block(None))
    products = 2 * ROWS * WIDTH * WIDTH
    assert counted(partial(trained, Block(reentrant))) == torchs.get_total_flops() == 6 * products


def test_gradients_of_gradients_are_counted() -> None:
    block, x = Block(None), torch.ones(ROWS, WIDTH, requires_grad=True)

    def penalized() -> None:
        (gradient,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
        torch.autograd.backward(gradient.square().sum())

    # Two of the forward and two for the gradient of x; then each factor of the latter but the ones
    # that it begins with, three, and the first layer's weight and x through tanh's derivative
    assert counted(penalized) == (2 + 2 + 3 + 2) * 2 * ROWS * WIDTH * WIDTH


@pytest.mark.parametrize("causal", [True, False])
def test_attention_counts_as_in_the_formula_of_palm(causal: bool) -> None:
    batch, heads, length, width = 2, 4, 32, 8
    query, key, value = (
        torch.ones(batch, heads, length, width, requires_grad=True) for _ in range(3)
    )
    attention = nn.functional.scaled_dot_product_attention

    def attended() -> None:
        torch.autograd.backward(attention(query, key, value, is_causal=causal).sum())

    assert counted(attended) == 12 * heads * width * length * (batch * length)


def test_a_plan_that_accumulates_has_the_flops_of_one_that_does_not() -> None:
    workload = Workload(classifier(), labelled(), criterion=CROSS_ENTROPY)
    found = []
    with open_prober(workload, (), Target("cpu", "1GiB")) as prober:
        plans = [ResolvedPlan(plan) for plan in (Plan(4), Plan(2, accumulation_steps=4))]
        for profiled, counted in itertools.product(plans, plans):
            _, flops = prober.run(partial(look_at_step, plan=profiled, counted=counted))
            found.append(flops)
    # forward and the gradients of weights for both layers, that of the data for the second alone
    assert found == [2 * (2 * 6 * 16 + 3 * 16 * 4)] * 4


def test_what_the_user_compiled_is_counted_as_written_and_stays_compiled() -> None:
    torch._dynamo.reset()
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    class Compiled(Block):
        def __init__(self) -> None:
            super().__init__(None)
            self.run = torch.compile(lambda x: self.layers(x), backend=backend, fullgraph=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.run(x).sum()
            return made

    def flops(model: nn.Module) -> float:
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        plan, device = ResolvedPlan(Plan(ROWS)), torch.device("cpu")
        with Training(model, optimizer, Recipe(loss_fn=_sum), plan, device=device) as training:
            return _flops_of_a_step(training, torch.ones(ROWS, WIDTH))

    model = Compiled()
    _sum(model, torch.ones(ROWS, WIDTH))
    assert flops(model) == flops(Block(None)) > 0
    before = len(ran)
    _sum(model, torch.ones(ROWS, WIDTH))
    assert len(ran) == before + 1
    torch._dynamo.reset()


def _sum(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).sum()
