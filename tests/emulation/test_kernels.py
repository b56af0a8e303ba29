"""Kernels whose buffers are known from their sources: peaks of a dry run against a card's."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

PROGRAM = """
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
    seen = autofit.probe(workload, device="cuda", strategies=[]).measurement
    found[name] = (
        [predicted.peak_allocated_bytes, predicted.peak_reserved_bytes],
        [seen.peak_allocated_bytes, seen.peak_reserved_bytes],
    )
print(json.dumps(found))
"""


@pytest.mark.emulated
def test_a_dry_run_counts_the_buffers_of_these_kernels(run_on: Callable[..., str]) -> None:
    found = json.loads(run_on(PROGRAM, values=True).splitlines()[-1])
    for name, (told, seen) in found.items():
        assert told == pytest.approx(seen, rel=0.002), name
