"""Predictions of the dry run and probes, held against what torch's allocator needs on a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.gpus import find_gpu
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.predict import predict
from autofit.probing.messages import ProbeRequest
from autofit.training.workload import Workload
from autofit.units import MIB
from benchmarks.oracle.emulation import Emulated, Emulation

GPU = "L4"
PAGE_BYTES = 2 * MIB


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


def workload(**options: Any) -> Workload:
    given: dict[str, Any] = {"model": build_model, "criterion": nn.functional.mse_loss} | options
    batch = (torch.randn(8, 512), torch.randn(8, 512))
    return Workload(given.pop("model"), batch, **given)


def emulated(made: Workload, plan: Plan | None = None) -> Emulated:
    with Emulation(made, (), find_gpu(GPU)) as emulation:
        return emulation.need(ResolvedPlan(plan or Plan(8)))


class Doubled(torch.autograd.Function):
    """Keeps twice its input for its backward pass, as no operator of torch does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.cat([x, x]))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (twice,) = ctx.saved_tensors
        return gradients[0] * 2 + 0 * twice[: len(gradients[0])]


class WithDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(self.layer(x))  # type: ignore[no-untyped-call]  # torch


class Careful(torch.optim.Optimizer):
    """Keeps a second copy of each gradient that is not zero, which takes its values."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded there
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.norm().item() > 0:
                    self.state[parameter]["last"] = parameter.grad.clone()
                    parameter.sub_(parameter.grad, alpha=1e-3)


@pytest.mark.emulated
def test_it_needs_what_a_dry_run_says() -> None:
    made = workload()
    told, predicted = emulated(made), predict(made, gpu=GPU)
    assert not told.computed_values
    ample = told.ample
    assert ample.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, abs=2048)
    low, high = predicted.interval
    assert low <= told.required_bytes <= high


@pytest.mark.emulated
def test_required_bytes_are_where_a_probe_begins_to_run() -> None:
    """A flush of the cache in the warm-up makes room, so less than peak reserved is enough."""

    def pyramid() -> nn.Module:
        widths = [512, 4096, 1024, 3072, 512]
        layers = (nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths))
        return nn.Sequential(*layers)

    made, resolved = workload(model=pyramid), ResolvedPlan(Plan(1000))
    with Emulation(made, (), find_gpu(GPU)) as emulation:
        need = emulation.need(resolved)
        required, seen = need.required_bytes, {}
        for budget in (required - PAGE_BYTES, required, required + PAGE_BYTES):
            request = ProbeRequest(resolved, vram_budget_bytes=budget, steps=3)
            seen[budget - required] = emulation.worker().probe(request).measurement
    assert seen[0].outcome is seen[PAGE_BYTES].outcome is Outcome.OK, seen
    assert seen[0].allocator_retries == seen[PAGE_BYTES].allocator_retries == 0
    less = seen[-PAGE_BYTES]
    assert less.outcome in (Outcome.OOM, Outcome.RETRIES), less
    assert need.limit_bytes < need.ample.peak_reserved_bytes


@pytest.mark.emulated
def test_a_function_of_autograd_of_the_users_own() -> None:
    made = workload(model=WithDoubled)
    told, predicted = emulated(made), predict(made, gpu=GPU)
    assert told.computed_values is False
    assert told.ample.peak_allocated_bytes == pytest.approx(
        predicted.peak_allocated_bytes, abs=2048
    )


@pytest.mark.emulated
def test_an_optimizer_that_looks_at_values() -> None:
    told = emulated(workload(optimizer=Careful))
    assert told.computed_values
    weights = sum(p.numel() * 4 for p in build_model().parameters())
    assert told.ample.peak_allocated_bytes >= 3 * weights  # themselves, gradients, their copies
