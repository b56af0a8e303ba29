"""attention.backend: offered where it changes what kernel runs, which then is the one that runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autofit.plan import Plan, ResolvedPlan
from autofit.registry import collect_dimensions, load_strategies
from autofit.strategy import Capabilities, Context
from autofit.testing import PlainContext, check_strategy
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

backends: Any = import_module("autofit.strategies.attention")  # lies elsewhere in the tree
HOPPER = Capabilities("cuda", bfloat16=True, float16=True, tf32=True, compute_capability=(9, 0))
SETTING = "attention.backend"


class Attends(nn.Module):
    """(n, 16, 64) -> (n, 16, 64), with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, batch: Tensor) -> Tensor:
        parts = self.inward(batch).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outward(mixed.transpose(1, 2).flatten(2))


def workload(dtype: torch.dtype = torch.float32) -> Workload:
    torch.manual_seed(0)
    batch = torch.randn(4, 16, 64, dtype=dtype), torch.randn(4, 16, 64, dtype=dtype)
    return Workload(Attends().to(dtype), batch, criterion=functional.mse_loss)


def in_half() -> Workload:
    return workload(torch.bfloat16)


def offered(context: Context) -> Any:
    return collect_dimensions(load_strategies(["attention"]), context).get(SETTING)


def test_nothing_is_offered_on_a_cpu() -> None:
    assert offered(PlainContext(workload, "cpu", Capabilities("cpu", bfloat16=True))) is None


@pytest.mark.cuda
def test_nothing_is_offered_to_a_model_without_attention() -> None:
    def perceptron() -> Workload:
        return Workload(nn.Linear(4, 4), torch.randn(2, 4))

    assert offered(PlainContext(perceptron, "cuda", HOPPER)) is None


@pytest.mark.cuda
def test_the_kernel_that_runs_by_default_is_not_offered_again() -> None:
    context = PlainContext(in_half, "cuda", HOPPER)
    values = offered(context).values
    (note, _) = context.notes
    (default,) = [name for name in ("flash", "efficient", "cudnn") if f"runs {name}" in note]
    assert values[0] == "default"
    assert default not in values
    assert len(values) > 2


@pytest.mark.cuda
def test_where_only_autocast_leaves_a_choice_it_goes_with_half_precision() -> None:
    found = offered(PlainContext(workload, "cuda", HOPPER))
    assert "bfloat16" in found.when["precision.dtype"]


@pytest.mark.cuda
@pytest.mark.parametrize("value", ["flash", "efficient"])
def test_the_kernel_that_is_named_runs_and_torch_is_left_as_it_was(value: str) -> None:
    made = in_half()
    model = made.build_model().cuda()
    (strategy,) = load_strategies(["attention"])
    plan = ResolvedPlan(Plan(4, settings={SETTING: value}), {}, (strategy,))
    recipe = Recipe(criterion=functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters())
    batch = tuple(tensor.cuda() for tensor in made.batch(4))

    def looked_at() -> Any:
        plain = ResolvedPlan(Plan(4), {}, ())
        with Training(model, optimizer, recipe, plain, device=torch.device("cuda")) as each:
            return backends._kernels(each, batch, None, None)

    before = looked_at()
    training = Training(model, optimizer, recipe, plan, device=torch.device("cuda"))
    kernels: set[str | None] = set()

    def note(function: Any, result: Any) -> None:
        if function is functional.scaled_dot_product_attention:
            kernels.add(backends._NAMES.get(type(result.grad_fn).__name__))

    with training, backends.Calls(note):
        training.step(batch)
    assert kernels == {value}
    assert looked_at() == before


@pytest.mark.cuda
def test_conformance() -> None:
    assert check_strategy("attention", workloads=[in_half], device="cuda", capabilities=HOPPER) > 1
