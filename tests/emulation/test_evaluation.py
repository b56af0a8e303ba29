"""The peak of an evaluation beside a training: an emulated card's, against that of a dry run."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

PROGRAM = """
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


@pytest.mark.emulated
def test_a_dry_run_tells_what_an_evaluation_reserves(run_on: Callable[..., str]) -> None:
    found = json.loads(run_on(PROGRAM, values=True).splitlines()[-1])
    for told, seen, trial in found.values():
        assert seen is not None, trial
        assert told == pytest.approx(seen, rel=0.02)
