"""Who trains by a report cuts the tensors that the search cut, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.training.workload import Workload
from tests.integrations.conftest import report_of

SAMPLES = 16


class Positioned(nn.Module):
    """Its batch holds positions, as many as there are samples in a step, and cut they broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.last = nn.Embedding(SAMPLES, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.places(positions)).square().mean()


def batch_of(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(samples, SAMPLES, 8), "positions": torch.arange(SAMPLES)}


@pytest.mark.parametrize("given", [batch_of(1), batch_of], ids=["batch", "function"])
def test_a_record_says_which_tensors_hold_samples_and_one_that_does_not_asks(given: Any) -> None:
    options = autofit.SearchOptions(max_micro_batch=2)
    here: Any = {"device": "cpu", "vram_budget": "64MiB", "strategies": [], "max_probes": 1}
    report = autofit.search(Positioned, given, global_batch=SAMPLES, options=options, **here)
    assert report.plan.accumulation_steps > 1
    assert report.to_dict()["workload"]["batched"] == ["['x']"]

    facts = {k: v for k, v in report.record.workload.items() if k != "batched"}
    silent = replace(report, record=replace(report.record, workload=facts))
    model = Positioned()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with pytest.raises(InvalidArgument, match="batched="):
        silent.apply(model, optimizer)
    with pytest.raises(InvalidArgument, match="'x'"):
        silent.apply(model, optimizer, batched=["x"])
    with silent.apply(model, optimizer, batched=["['x']"]) as training:
        assert torch.isfinite(training.step(batch_of(SAMPLES)))


def test_a_step_takes_the_function_whose_batches_show_their_samples() -> None:
    def make(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(4.0 * samples).view(samples, 4), torch.arange(samples) % 3

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    workload = Workload(model, make, criterion=nn.CrossEntropyLoss(), global_batch=8)
    parts = torch.stack(
        [nn.functional.cross_entropy(model(x), y) * len(y) / 8 for x, y in map(make, (3, 3, 2))]
    )
    report = report_of(workload, Plan.split(8, 3))
    with report.apply(model, torch.optim.SGD(model.parameters(), 0.0)) as training:
        torch.testing.assert_close(training.step(make), parts.sum().detach())


@pytest.mark.parametrize("batch", [None, [], {}, torch.tensor(1.0), lambda model: model])
def test_what_holds_no_samples_is_refused_in_words(batch: Any) -> None:
    model = nn.Linear(4, 3)
    given = torch.randn(8, 4), torch.arange(8) % 3
    report = report_of(Workload(model, given, criterion=nn.CrossEntropyLoss()), Plan(8))
    with (
        report.apply(model, torch.optim.SGD(model.parameters(), 0.0)) as training,
        pytest.raises(InvalidArgument, match="tensor"),
    ):
        training.step(batch)
