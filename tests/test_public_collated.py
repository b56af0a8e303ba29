"""A search over samples and a collate_fn, and the training by its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autofit
from tests.workloads.collated import CASES

HERE: dict[str, Any] = {
    "device": "cpu",
    "vram_budget": "64MiB",
    "strategies": [],
    "max_probes": 1,
    "progress": False,
}


def test_what_the_search_collated_by_a_training_collates_by(tmp_path: Path) -> None:
    case = CASES["graphs"]
    workload = autofit.Workload(
        case.build,
        case.samples(4),
        collate_fn=case.collate,
        loss_fn=case.loss_fn,
        global_batch=12,
    )
    report = autofit.search(workload, **HERE)
    plan = report.plan
    assert (plan.micro_batch, plan.accumulation_steps) == (4, 3)
    facts = report.record.workload
    assert facts["samples"] == "collate_fn"
    assert "collate_fn" in facts["given"]
    assert "collate_fn=collate_fn" in report.export("pytorch")
    report.save(tmp_path / "report.json")
    loaded = autofit.load(tmp_path / "report.json")
    losses = []
    functions: dict[str, Any] = {"collate_fn": case.collate, "loss_fn": case.loss_fn}
    for each, given in ((report, {}), (loaded, functions)):
        torch.manual_seed(0)
        model = case.build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if given:
            with pytest.raises(autofit.InvalidArgument, match="collate_fn"):
                each.apply(model, optimizer, loss_fn=case.loss_fn)
        with each.apply(model, optimizer, **given) as training:
            losses.append(float(training.step(case.samples(12))))
            with pytest.raises(autofit.InvalidArgument, match="list of samples"):
                training.step(case.collate(case.samples(12)))
    torch.manual_seed(0)
    whole = case.loss_fn(case.build(), case.collate(case.samples(12)))
    assert losses == pytest.approx([whole.item()] * 2, rel=1e-5)


def test_a_function_begins_with_the_global_batch_in_one_micro_batch() -> None:
    case = CASES["detection"]
    report = autofit.search(
        case.build,
        lambda samples: case.collate(case.samples(samples)),
        loss_fn=case.loss_fn,
        global_batch=4,
        **HERE,
    )
    assert str(report.plan) == "4 x 1"
    assert report.record.workload["samples"] == "function"
    model = case.build()
    with report.apply(model, torch.optim.SGD(model.parameters(), 0.1)) as training:
        assert torch.isfinite(training.step(case.collate(case.samples(4))))
