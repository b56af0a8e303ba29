"""After a search or a probe, however it ends, the user's objects and the process are as before."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import autofit
from autofit.errors import SearchTimedOut
from autofit.measurement import Outcome
from autofit.snapshot.snapshot import differences, digest

BATCH = 4


class Restless(nn.Module):
    """Changes in every way that a forward may, and is asked to fail where `fault` says."""

    scratch: torch.Tensor

    def __init__(self, fault: Callable[[int], object]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Dropout(0.2))
        self.head = nn.Linear(256, 8)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.calls = 0
        self.seen: list[int] = []
        self.fault = fault

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(inputs))
        self.scratch += 1
        random.random()
        numpy.random.rand()
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        warnings.simplefilter("ignore")
        self.fault(len(inputs))
        return self.head(self.body(inputs))


def behaves(_: int) -> None:
    """Never fails; the budget ends the climb."""


def refuses(samples: int) -> None:
    if samples > BATCH:
        raise RuntimeError("CUDA error: invalid configuration argument")


def has_a_bug(_: int) -> None:
    raise KeyError("a bug of the user's")


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """A live optimizer with a state, and gradients that the user has left on the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        torch.autograd.backward(model(torch.ones(BATCH, 8)).sum())
        optimizer.step()
    return optimizer


def searched(model: nn.Module, optimizer: Any, **limits: Any) -> Any:
    arguments = {"strategies": [], "device": "cpu", "vram_budget": "8MiB"} | limits
    batch = torch.ones(BATCH, 8)
    return autofit.search(model, batch, optimizer=optimizer, **arguments)


@pytest.mark.usefixtures("spared_process")
@pytest.mark.parametrize(
    ("fault", "limits", "ends"),
    [
        (behaves, {"max_probes": 4, "strategies": ["precision"]}, None),
        (behaves, {"timeout": 1e-3}, SearchTimedOut),
        (refuses, {"max_probes": 3}, None),
        (has_a_bug, {}, KeyError),
    ],
    ids=["to the end", "out of time", "size limit", "the user's bug"],
)
def test_a_search_leaves_nothing_behind(
    fault: Any, limits: dict[str, Any], ends: type[Exception] | None
) -> None:
    model = Restless(behaves)
    optimizer = trained(model)
    model.fault = fault
    objects = {"model": model, "optimizer": optimizer}
    before = digest(objects)
    if ends is None:
        assert searched(model, optimizer, **limits).best.measurement.ok
    else:
        with pytest.raises(ends, match=r"a bug of the user's|timeout"):
            searched(model, optimizer, **limits)
    assert differences(before, digest(objects)) == []


@pytest.mark.usefixtures("spared_process")
def test_out_of_memory_leaves_nothing_behind() -> None:
    model = Restless(behaves)
    optimizer = trained(model)
    objects = {"model": model, "optimizer": optimizer}
    before = digest(objects)
    workload = autofit.Workload(model, torch.ones(BATCH, 8), optimizer=optimizer)
    trial = autofit.probe(
        workload,
        plan=autofit.Plan(2**15),
        device="cpu",
        vram_budget="8MiB",
        strategies=[],
    )
    assert trial.measurement.outcome is Outcome.OOM
    assert differences(before, digest(objects)) == []


@pytest.mark.usefixtures("spared_process")
def test_no_files_are_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = Restless(behaves)
    searched(model, torch.optim.SGD(model.parameters()), max_probes=2)
    assert list(tmp_path.iterdir()) == []
