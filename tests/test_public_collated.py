"""A search over samples and a collate_fn, and the training by its report."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

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
    functions: Any = {"collate_fn": case.collate, "loss_fn": case.loss_fn}
    workload = autofit.Workload(case.build, case.samples(4), global_batch=12, **functions)
    report = autofit.search(workload, **HERE)
    assert report.plan.micro_batch_sizes == (4, 4, 4)
    facts = report.record.workload
    assert (facts["samples"], facts["given"]) == ("collate_fn", ["collate_fn", "loss_fn"])
    assert "collate_fn=collate_fn" in report.export("pytorch")
    loaded = autofit.load(report.save(tmp_path / "report.json"))
    model = case.build()
    whole = case.loss_fn(model, case.collate(case.samples(12))).item()
    with pytest.raises(autofit.InvalidArgument, match="collate_fn"):
        loaded.apply(model, torch.optim.SGD(model.parameters()), loss_fn=case.loss_fn)
    for each, given in ((report, {}), (loaded, functions)):
        with each.apply(model, torch.optim.SGD(model.parameters(), 0.0), **given) as training:
            assert float(training.step(case.samples(12))) == pytest.approx(whole, rel=1e-5)
            with pytest.raises(autofit.InvalidArgument, match="list of samples"):
                training.step(case.collate(case.samples(12)))


def test_a_function_begins_with_the_global_batch_in_one_micro_batch() -> None:
    case = CASES["detection"]
    batch: Any = lambda samples: case.collate(case.samples(samples))  # noqa: E731
    report = autofit.search(case.build, batch, loss_fn=case.loss_fn, global_batch=4, **HERE)
    assert str(report.plan) == "4 x 1"
    assert report.record.workload["samples"] == "function"
    model = case.build()
    with report.apply(model, torch.optim.SGD(model.parameters(), 0.1)) as training:
        assert torch.isfinite(training.step(batch(4)))


@functools.cache
def searched(kind: str) -> autofit.Report:
    workload = autofit.Workload(embedding, loss_fn=mean, global_batch=8, **GIVEN[kind])
    return autofit.search(workload, **HERE)


class Texts(Dataset[torch.Tensor]):
    """Of 12 tokens, and each fifth of 20, but not the first ones."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((20 if at % 5 == 4 else 12,), at % 32)


def padded(texts: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 4))


def mean(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


TEXTS = Texts()
GIVEN: dict[str, Any] = {
    "data set": {"sample_batch": TEXTS, "collate_fn": padded},
    "list": {"sample_batch": [TEXTS[at] for at in range(10)], "collate_fn": padded},
    "lengths": {
        "sample_batch": autofit.Lengths([[TEXTS[4], TEXTS[3]], [TEXTS[0]] * 8]),
        "collate_fn": padded,
    },
    "function": {"sample_batch": lambda n: padded([TEXTS[at] for at in range(n)])},
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("loaded", [False, True])
def test_the_padding_of_a_micro_batch_is_no_reason_to_warn(
    kind: str, loaded: bool, tmp_path: Path
) -> None:
    """The samples are those of the search; only the first of them are shorter."""
    report, given, model = searched(kind), dict[str, Any](), embedding()
    collates = "collate_fn" in GIVEN[kind]
    if loaded:
        report = autofit.load(report.save(tmp_path / "report.json"))
        given = {"loss_fn": mean, **({"collate_fn": padded} if collates else {})}
    samples = [[TEXTS[at] for at in range(first, first + 8)] for first in (0, 8, 16)]
    steps: list[Any] = [*map(padded, samples)]  # as a loader's processes make them
    with report.apply(model, torch.optim.SGD(model.parameters(), 0.1), **given) as training:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in (*steps, *(samples if collates else ())):
                training.step(step)
        longer = [text.repeat(2) for text in samples[0]]
        with pytest.warns(UserWarning, match="search again|Search again"):
            training.step(longer if collates else padded(longer))


def test_tokens_of_a_sample_are_those_of_all_that_were_given() -> None:
    tokens = searched("data set").record.workload["tokens"]
    padded_to = [max(len(TEXTS[at]) for at in range(first, first + 8)) for first in range(0, 32, 8)]
    assert tokens["per_sample"] == round(sum(padded_to) / len(padded_to))
