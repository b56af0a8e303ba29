"""Where the time of a step goes: plans whose bound is known by how they are made."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.measurement import BOUNDS
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import Target, open_prober
from autofit.probing.profile import StepProfile, look_at_step
from autofit.training.workload import Workload


class Products(nn.Module):
    """Large products, and as good as no parameters."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        left = rows.expand(512, 512) * self.scale
        for _ in range(4):
            left = left @ left / 512
        return left

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Passes(Products):
    """Many passes over a few MiB."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.expand(512, 2048) * self.scale
        for _ in range(6):
            wide = torch.sin(wide)
        return wide


class Sleeps(Products):
    """Between its operators Python does something else."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return rows.sum() * self.scale


class Holds(nn.Module):
    """A large table of which one row is trained on: the update is the work."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(2_000_000))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table[:1] * rows.sum()


def profiled(model: nn.Module, plan: Plan | None = None, **given: Any) -> Any:
    workload = Workload(model, torch.ones(2, 1), loss_fn=lambda net, rows: net(rows[:1]).mean())
    with open_prober(workload, (), Target("cpu", "1GiB")) as prober:
        look = partial(look_at_step, plan=ResolvedPlan(plan or Plan(2)), **given)
        return prober.run(look)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "bound"),
    [
        (Products(), "arithmetic"),
        (Passes(), "memory traffic"),
        (Sleeps(), "launches"),
        (Holds(), "optimizer"),
    ],
)
def test_what_bounds_a_step_is_seen(model: nn.Module, bound: str) -> None:
    found = profiled(model)
    shares = found.shares(1.0)
    assert sum(shares.values()) == pytest.approx(1)
    assert max(BOUNDS, key=shares.__getitem__) == bound
    assert shares[bound] > 0.5


def test_a_trace_is_written_in_torchs_own_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profiled(Products(), trace=str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {event.get("name") for event in events}


@pytest.mark.slow
def test_what_is_accumulated_counts_whole_and_the_update_once() -> None:
    one = profiled(Products(), Plan(1, accumulation_steps=2))
    many = profiled(Products(), Plan(1, accumulation_steps=64))
    assert many.operators == one.operators  # two micro-batches were run of either
    assert many.seconds["arithmetic"] > 8 * one.seconds["arithmetic"]
    assert many.seconds["optimizer"] < 8 * one.seconds["optimizer"]


def test_what_kernels_do_not_fill_of_a_step_is_launches() -> None:
    seconds = {"arithmetic": 0.2, "memory traffic": 0.1, "optimizer": 0.1, "launches": 0.0}
    shares = StepProfile(seconds, 10, on_gpu=True).shares(0.8)
    assert shares == pytest.approx(
        {"arithmetic": 0.25, "memory traffic": 0.125, "optimizer": 0.125, "launches": 0.5}
    )
    crowded = StepProfile(seconds, 10, on_gpu=True).shares(0.3)  # kernels ran beside each other
    assert crowded["launches"] == 0.0
    assert sum(crowded.values()) == pytest.approx(1)
