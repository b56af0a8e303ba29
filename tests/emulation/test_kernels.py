"""Peaks of a dry run against a card's: of kernels known from their sources, and of evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.emulated

KERNELS = """
import json

import torch
from torch import nn
from torch.nn import functional

import autofit


class Transposed(nn.Module):  # so that layers see data that is not contiguous
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)

    def forward(self, data):
        rows = self.first(data.transpose(0, 1).transpose(2, 3)).transpose(0, 1)
        return self.last(self.norm(rows))


class Grouped(nn.Module):  # grouped queries, a mask and dropout: the math backend runs
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, data):
        heads = self.layer(data).unflatten(-1, (8, 16)).transpose(1, 2)
        mask = torch.zeros(256, 256, device=data.device)
        return functional.scaled_dot_product_attention(
            heads, heads[:, :2], heads[:, :2], mask, 0.1, enable_gqa=True
        )


def table():
    return nn.Sequential(nn.Embedding(8192, 256), nn.Linear(256, 8))


def loss_fn(model, batch):
    return model(batch).float().square().mean()


cases = {
    "norms": (table, torch.randint(0, 8192, (4, 16)), torch.optim.Adafactor),
    "transposed": (Transposed, torch.randn(8, 16, 64, 512), torch.optim.SGD),
    "grouped": (Grouped, torch.randn(8, 256, 128), torch.optim.SGD),
}
found = {}
for name, (build, batch, optimizer) in cases.items():
    workload = autofit.Workload(build, batch, loss_fn=loss_fn, optimizer=optimizer)
    predicted = autofit.predict(workload, gpu="H200")
    trial = autofit.probe(workload, device="cuda", strategies=[])
    seen = trial.measurement
    found[name] = (
        [predicted.peak_allocated_bytes, predicted.peak_reserved_bytes],
        [seen.peak_allocated_bytes, seen.peak_reserved_bytes],
        str(trial),
    )
print(json.dumps(found))
"""
EVALUATIONS = """
import json

import torch
from torch import nn

import autofit


def images():
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3))


def layers():
    return nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256))


def table():  # whose evaluation holds less than its training, and than a copy of its weights
    return nn.Sequential(nn.Embedding(50_000, 128), nn.Linear(128, 8))


def loss_fn(model, batch):
    return model(batch).float().square().mean()


cases = {
    "images": (images, torch.randn(8, 3, 64, 64)),
    "layers": (layers, torch.randn(64, 256)),
    "table": (table, torch.randint(0, 50_000, (8, 64))),
}
found = {}
for name, (build, batch) in cases.items():
    workload = autofit.Workload(
        build, batch, loss_fn=loss_fn, eval_step=loss_fn, eval_batch=16 * len(batch)
    )
    predicted = autofit.predict(workload, gpu="H200")
    trial = autofit.probe(workload, device="cuda", strategies=[])
    told = predicted.evaluation_bytes - predicted.breakdown["non_torch"]
    found[name] = told, trial.measurement.evaluation_peak_bytes, str(trial)
print(json.dumps(found))
"""


@pytest.mark.parametrize(("program", "apart"), [(KERNELS, 0.002), (EVALUATIONS, 0.02)])
def test_a_dry_run_tells_what_a_card_holds(
    program: str, apart: float, run_on: Callable[..., str]
) -> None:
    """In kernels whose buffers it counts, and in an evaluation beside a training."""
    found = json.loads(run_on(program, values=True).splitlines()[-1])
    for name, (told, seen, trial) in found.items():
        assert told == pytest.approx(seen, rel=apart), (name, trial)
