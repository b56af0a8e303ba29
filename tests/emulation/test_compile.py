"""Compiled plans on an emulated GPU: Triton's kernels are compiled for the card, memory is told."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

PROGRAM = """
import json

import gc

import torch
from torch import nn

import autofit
from autofit.registry import load_strategies
from autofit.plan import Plan, ResolvedPlan
from autofit.training.loss import Recipe
from autofit.codec import to_json
from autofit.training.training import Training


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(256, 512)

    def forward(self, x):
        return nn.functional.gelu(self.first(x)).cos().square().mean()


workload = autofit.Workload(Model, torch.randn(4096, 256), optimizer=torch.optim.SGD)
found = {}
for mode in ("off", "default"):
    plan = autofit.Plan(4096, settings={"compile.mode": mode})
    trial = autofit.probe(
        workload, plan=plan, device="cuda", strategies=["compile"]
    )
    found[mode] = to_json(trial.measurement)


def pool_bytes():
    # of CUDA graphs
    gc.collect()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if each["segment_pool_id"] != (0, 0))


model = Model().cuda()
plan = Plan(4096, settings={"compile.mode": "reduce-overhead"})
resolved = ResolvedPlan(plan, {}, load_strategies(["compile"]))
optimizer = torch.optim.SGD(model.parameters())
torch.cuda.reset_peak_memory_stats()
device = torch.device("cuda", 0)
with Training(model, optimizer, Recipe(), resolved, device=device) as training:
    for _ in range(4):
        training.step(torch.randn(4096, 256, device=device))
    inside, notes = pool_bytes(), training.notes()
peak = torch.cuda.max_memory_reserved()
del training
found["graphs"] = {"inside": inside, "peak": peak, "after": pool_bytes(), "notes": notes}
print(json.dumps(found))
"""


@pytest.mark.emulated
@pytest.mark.slow
def test_the_memory_of_a_compiled_plan_is_told(run_on: Callable[..., str]) -> None:
    """Fused, what lies between the product and the loss is no longer kept.

    CUDA graphs hold memory of their own, which counts, until the plan is left.
    """
    found = json.loads(run_on(PROGRAM).splitlines()[-1])
    plain, compiled = found["off"], found["default"]
    assert plain["outcome"] == compiled["outcome"] == "ok", compiled["detail"]
    assert compiled["notes"] == ["compile: 1 graphs, 0 graph breaks, 0 recompilations"]
    assert compiled["start_up_s"] > plain["start_up_s"]
    graphs = found["graphs"]
    assert graphs["notes"] == compiled["notes"]  # none of them could not become a CUDA graph
    # what the backward needs, and the gradients
    assert graphs["inside"] > 4096 * 512 * 4 + 256 * 512 * 4
    assert graphs["peak"] >= graphs["inside"]
    assert graphs["after"] == 0
    assert compiled["peak_reserved_bytes"] >= compiled["peak_allocated_bytes"] > 4096 * 512 * 4


BUDGETS = """
import json

import torch
from torch import nn

from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.training.loss import Recipe
from autofit.training.training import Training


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(64), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.drop(self.mlp(self.norm(x)))


device, peaks = torch.device("cuda", 0), []
payloads = {"compile.region": {"modules": [[str(number) for number in range(6)]]}}
for budget in (1.0, 0.5, 0.05):
    model = nn.Sequential(*(Block() for _ in range(6))).cuda()
    settings = {
        "compile.mode": "default", "compile.region": "blocks", "compile.memory_budget": budget
    }
    resolved = ResolvedPlan(Plan(4096, settings=settings), payloads, load_strategies(["compile"]))
    optimizer, batch = torch.optim.SGD(model.parameters()), torch.randn(4096, 64, device=device)
    recipe = Recipe(loss_fn=lambda model, batch: model(batch).square().mean())
    with Training(model, optimizer, recipe, resolved, device=device) as training:
        training.step(batch)
        torch.cuda.reset_peak_memory_stats()
        training.step(batch)
        peaks.append(torch.cuda.max_memory_allocated())
        notes = training.notes()
print(json.dumps([peaks, notes]))
"""


@pytest.mark.emulated
@pytest.mark.slow
def test_bytes_fall_as_the_memory_budget_falls(run_on: Callable[..., str]) -> None:
    peaks, notes = json.loads(run_on(BUDGETS).splitlines()[-1])
    inner = 6 * 4096 * 256 * 4  # kept of each block for its backward, without a budget
    assert peaks[0] > inner
    assert peaks[0] > 1.2 * peaks[1] > 1.2 * peaks[2], peaks
    # One for the first block, whose input needs no gradient, and one for the others
    assert notes[0] == "compile: 2 graphs, 0 graph breaks, 1 recompilations"
