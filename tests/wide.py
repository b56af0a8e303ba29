"""A training whose weights are large beside its samples, and what settings make it hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autofit
from autofit.plan import Plan
from autofit.training.workload import Workload

WIDTH, LAYERS = 128, 12
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)

adamw = partial(torch.optim.AdamW, foreach=False)


def wide(**given: Any) -> Workload:
    """Linear layers on four samples."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    return Workload(layers, batch, criterion=functional.mse_loss, **given)


def peaks(setting: str, values: Sequence[str], device: str, **options: Any) -> list[int]:
    """Return the peak allocated bytes at each value of a setting, as probes measure them."""
    found = []
    for value in values:
        plan = Plan(4, settings={setting: value, "optimizer.implementation": "default"})
        trial = autofit.probe(wide(optimizer=adamw), plan=plan, device=device, **options)
        assert trial.ok, trial.measurement.detail
        found.append(trial.measurement.peak_allocated_bytes or 0)
    return found


def assert_predicted(setting: str, values: Sequence[str]) -> list[int]:
    """Hold dry runs at each value of a setting to probes on this GPU; return the peaks."""
    measured = peaks(setting, values, "cuda")
    for value, peak in zip(values, measured, strict=True):
        plan, gpu = Plan(4, settings={setting: value}), torch.cuda.get_device_name()
        predicted = autofit.predict(wide(optimizer=adamw), plan=plan, gpu=gpu)
        assert predicted.peak_allocated_bytes == pytest.approx(peak, rel=0.01)
    return measured
