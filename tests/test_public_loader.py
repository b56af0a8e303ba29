"""`autofit.search(loader=...)` as a user calls it: what it says of real loaders on the CPU."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autofit
from tests.probing.test_loader_measured import Rows, stuck, tired

HERE: dict[str, Any] = {
    "device": "cpu",
    "vram_budget": "64MiB",
    "max_probes": 1,
    "strategies": [],
}
SAMPLES = 16


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(SAMPLES, 8), torch.arange(SAMPLES) % 3


class Slow(nn.Linear):
    """Takes 0.1 s for any batch: far more than any loader here, on a busy machine too."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return super().forward(rows)


def fed_by(loader: Any, layer: nn.Linear | None = None) -> autofit.Workload:
    """Return a training of a layer whose batches that loader makes."""
    given: Any = {"criterion": nn.CrossEntropyLoss(), "loader": loader}
    return autofit.Workload(layer or nn.Linear(8, 3), batch(), **given)


def said(report: autofit.Report) -> str:
    return " ".join(report.to_text(verbose=True).split())


@pytest.mark.slow
def test_a_slow_loader_is_the_bottleneck_and_workers_are_recommended(tmp_path: Path) -> None:
    read, trace = tmp_path / "read", tmp_path / "trace.json"
    read.mkdir()
    photographs = functools.partial(DataLoader, Rows(read, tired, 8), shuffle=True)
    options = autofit.SearchOptions(profile=trace)
    report = autofit.search(fed_by(photographs), options=options, **HERE)
    findings = report.record.findings
    found = findings["loader"]
    assert (found["bottleneck"], found["own_workers"]) == ("loader", 0)
    assert found["num_workers"] > 1
    speeds = {each["num_workers"]: each["samples_per_second"] for each in found["delivered"]}
    assert set(speeds) == {0, 1, 2, 4, 8}
    assert speeds[found["num_workers"]] > 1.5 * speeds[0]
    assert speeds[0] < 100  # they take 10 ms each
    assert str(os.getpid()) not in {path.name for path in read.iterdir()}
    assert "traceEvents" in json.loads(trace.read_text())
    assert set(findings["bounds"]["best"]) >= {"arithmetic", "launches"}
    assert findings["flops"]["per_sample"] == 2 * (2 * 8 * 3), "forward and gradient"
    loaded = autofit.load(report.save(tmp_path / "report.json"))
    assert loaded.record.findings == findings
    assert "The loader is slower than the device" in said(loaded)


@pytest.mark.slow
def test_a_loader_that_keeps_up_needs_no_workers() -> None:
    rows = TensorDataset(torch.ones(4000, 8), torch.zeros(4000, dtype=torch.int64))
    live = DataLoader(rows, 4, shuffle=True, num_workers=2)
    report = autofit.search(fed_by(live, Slow(8, 3)), **HERE)
    found = report.record.findings["loader"]
    assert [found[key] for key in ("bottleneck", "num_workers", "own_workers")] == ["device", 0, 2]
    assert "keeps the device busy" in said(report)


def test_a_loader_that_fails_costs_no_answer() -> None:
    def torn(rows: Any) -> Any:
        raise ValueError("this photograph is torn")

    live = DataLoader(TensorDataset(torch.ones(4, 8)), 2, collate_fn=torn)
    report = autofit.search(fed_by(live), **HERE)
    assert report.best.ok
    assert report.record.findings["loader"]["failed"] == "ValueError: this photograph is torn"
    assert "measured to the end: ValueError: this photograph is torn" in said(report)


@pytest.mark.slow
def test_a_loader_that_hangs_ends_with_the_timeout_and_costs_no_answer(tmp_path: Path) -> None:
    hanging = functools.partial(DataLoader, Rows(tmp_path, stuck, 8))
    report = autofit.search(fed_by(hanging), timeout=12, **HERE)
    assert report.best.ok
    assert report.record.findings["loader"]["failed"] == "the time of the search was over"
    assert not any(Path(f"/proc/{path.name}").exists() for path in tmp_path.iterdir())
