"""Compiled plans on an emulated GPU: Triton's kernels are compiled for the card, memory is told."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

PROGRAM = """
import json

import torch
from torch import nn

import autofit


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
        workload, plan=plan, device="cuda", isolation="inprocess", strategies=["compile"]
    )
    found[mode] = trial.measurement.to_dict()
print(json.dumps(found))
"""


@pytest.mark.emulated
@pytest.mark.slow
def test_the_memory_of_a_compiled_plan_is_told(run_on: Callable[..., str]) -> None:
    """Fused, what lies between the product and the loss is no longer kept."""
    found = json.loads(run_on(PROGRAM).splitlines()[-1])
    plain, compiled = found["off"], found["default"]
    assert plain["outcome"] == compiled["outcome"] == "ok", compiled["detail"]
    assert compiled["notes"] == ["compile: 1 graphs, 0 graph breaks, 0 recompilations"]
    assert compiled["start_up_s"] > plain["start_up_s"]
    assert compiled["peak_reserved_bytes"] >= compiled["peak_allocated_bytes"] > 4096 * 512 * 4
