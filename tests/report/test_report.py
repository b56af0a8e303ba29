"""A report is saved, loaded, tabulated; what it cannot do it says."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.report.record import Record
from autofit.report.report import Report, load
from autofit.strategy import TrainingView
from tests.plugin import Plugin

LOSS: dict[str, Any] = {"criterion": nn.CrossEntropyLoss()}


def test_the_suffix_chooses_the_form(record: Record, tmp_path: Path) -> None:
    report, found = Report(record), {}
    for suffix in (".json", ".html", ".md", ".txt"):
        found[suffix] = report.save(tmp_path / f"report{suffix}").read_text()
    assert json.loads(found.pop(".json")) == json.loads(json.dumps(report.to_dict()))
    assert found == {
        ".html": report.to_html(), ".md": report.to_markdown(), ".txt": report.to_text()
    }  # fmt: skip
    assert str(report) == report.to_text()


@pytest.mark.parametrize("name", ["no folder/report.json", "taken.json"])
def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left_behind(
    record: Record, tmp_path: Path, name: str
) -> None:
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(InvalidArgument, match=re.escape(name)):
        Report(record).save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.json"]


def test_a_link_to_a_report_stays_a_link_and_its_file_keeps_its_mode(
    record: Record, tmp_path: Path
) -> None:
    real, link = tmp_path / "2026.json", tmp_path / "newest.json"
    real.write_text("{}")
    real.chmod(0o640)
    link.symlink_to(real.name)
    Report(record).save(link)
    assert link.is_symlink()
    assert load(real).best == load(link).best
    assert real.stat().st_mode & 0o777 == 0o640


def test_the_table_has_a_row_a_trial_and_a_column_a_setting(record: Record, tmp_path: Path) -> None:
    table = pd.read_csv(Report(record).save(tmp_path / "report.csv"))
    assert list(table["number"]) == list(range(8))
    assert list(table["folding.level"]) == [0, 0, 2, 1, 0, 1, 1, 0]
    assert list(table["outcome"])[:3] == ["ok", "oom", "unsupported"]
    assert {"micro_batch", "accumulation_steps", "global_batch"} <= set(table.columns)
    assert table["samples_per_second"].idxmax() == 6
    assert "paste" not in table.columns, "code belongs to no cell"
    noted = replace(record.trials[3].measurement, notes=("it's 5% off",))
    trials = (replace(record.trials[3], number=0, measurement=noted),)
    noted_table = Report(replace(record, trials=(*trials, *record.trials[1:])))
    cells = pd.read_csv(noted_table.save(tmp_path / "noted.csv"))
    assert json.loads(cells["notes"][0]) == ["it's 5% off"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[1, 2]", "list"),
        ("{}", "not an autofit report"),
        ('{"schema": 1}', "autofit report"),
        (b"\xff\xfe\x00PK", "JSON"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidArgument, match=words):
        load(path)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (None, "None"),
        (torch.optim.SGD, "<class 'torch.optim.sgd.SGD'>"),
        ({"0": None}, "optimizer.*training_step"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]), "none of the model's parameters"),
    ],
)
def test_what_cannot_step_is_refused_before_the_first_step(
    record: Record, optimizer: object, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Report(record).apply(nn.Linear(8, 4), optimizer, **LOSS)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, r"nn\.Module.*None"),
        (nn.Linear, r"nn\.Module"),
        (nn.ReLU(), "ReLU"),
        (nn.LazyLinear(4), "one batch"),
    ],
)
def test_what_is_no_model_to_train_is_refused(record: Record, model: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        baseline_of(record).apply(model, linear()[1], **LOSS)


def test_a_strategy_that_is_not_installed_here_is_named_and_may_be_given(record: Record) -> None:
    model, optimizer = linear()
    with pytest.raises(InvalidArgument, match="'folding'"):
        Report(record).apply(model, optimizer, **LOSS)
    with Report(record).apply(model, optimizer, **LOSS, strategies=[Folding()]):
        assert model.folded == ["blocks.0"]
    assert not hasattr(model, "folded")


class Folding(Plugin):
    """A strategy that is not installed: its settings are written on the model."""

    name = "folding"

    @contextmanager
    def apply(self, training: TrainingView, settings: Any, payloads: Any) -> Iterator[None]:
        training.model.folded = payloads["folding.level"]
        yield
        del training.model.folded


def test_a_strategy_that_is_not_installed_here_may_be_given(record: Record) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"criterion": torch.nn.CrossEntropyLoss(), "strategies": [Folding()]}
    with Report(record).apply(model, optimizer, **given):
        assert model.folded == ["blocks.0"]
    assert not hasattr(model, "folded")


def test_a_model_of_another_size_is_trained_with_a_warning(record: Record) -> None:
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"\b45\b.*\b36\b") as warned:
        baseline_of(record).apply(model, optimizer, **LOSS).undo()
    assert warned[0].filename == __file__


@pytest.mark.parametrize(("is_same_model", "is_same_optimizer"), [(1, 1), (1, 0), (0, 1)])
def test_a_model_in_an_open_training_is_not_applied_to_again(
    record: Record, is_same_model: bool, is_same_optimizer: bool
) -> None:
    report, (model, another), other = baseline_of(record), linear(), nn.Linear(8, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    second = model if is_same_model else other, optimizer if is_same_optimizer else another
    first = report.apply(model, optimizer, **LOSS)
    with first, pytest.raises(InvalidArgument, match=r"not ended.*undo"):
        report.apply(*second, **LOSS)
    with report.apply(*second, **LOSS) as training:
        assert training.plan == report.plan


def _step(record: Record, *batches: Any, own_loop: bool = False, **given: Any) -> list[str]:
    """Train the baseline on those; return what was warned of."""
    given["loss_fn"] = lambda model, batch: model(batch[0]).sum()
    training = baseline_of(record).apply(*linear(), **given)
    step = (lambda batch: list(training.micro_batches(batch))) if own_loop else training.step
    with warnings.catch_warnings(record=True) as warned, training:
        warnings.simplefilter("always")
        for batch in batches:
            step(batch)
    assert {warning.filename for warning in warned} <= {__file__}
    return [str(warning.message) for warning in warned]


def _labelled(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 8), torch.zeros(samples, dtype=torch.int64)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize(
    ("micro_batch", "samples", "words"),
    [
        (4, (32, 40, 48, 5), [r"\b40\b.*4 x 8.*\b32\b.*10 micro-batches"]),
        # fewer samples at first do not hide more later
        (
            4,
            (20, 50, 24, 65),
            [
                r"got 20 samples.* takes 32:.* 5 micro-batches.* all 20$",
                r"got 50 samples.* takes 32:.* 13 micro-batches.* all 50$",
            ],
        ),
        # 3 x 11 are 33, and the plan has 32 samples
        (3, (40,), [r"\(3 x 11\) takes 32, in micro-batches of 3 and 2:"]),
    ],
)
def test_other_samples_than_the_plans_are_warned_of_once(
    record: Record, micro_batch: int, samples: tuple[int, ...], words: list[str], own_loop: bool
) -> None:
    given = replace(record.trials[0], plan=Plan.split(32, micro_batch))
    record = replace(record, trials=(given, *record.trials[1:]))
    warned = _step(record, *map(_labelled, samples), own_loop=own_loop)
    assert len(warned) == len(words)
    assert all(map(re.search, words, warned))


def test_a_split_that_was_not_found_equal_is_refused_and_not_said_to_run(record: Record) -> None:
    kept = replace(record, workload={**record.workload, "may_change_accumulation": False})
    with pytest.raises(InvalidArgument, match=r"got 40 samples.* takes 32: that would be 10") as no:
        _step(kept, _labelled(40))
    assert "runs as" not in str(no.value)


def test_samples_longer_than_the_sample_batchs_are_warned_of_once(record: Record) -> None:
    inputs, target = _labelled(32)
    shapes = {"[0]": "float32[4, 6, 8]", "[1]": "int64[4]"}
    record = replace(record, workload={**record.workload, "sample_shapes": shapes})
    wider = [inputs[:, None].expand(-1, length, -1) for length in (6, 2, 9, 12)]
    (warned,) = _step(record, *((x, target) for x in wider))
    assert re.search(r"\[0\].*float32\[4, 9, 8\].*float32\[4, 6, 8\]", warned)


def _padded(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.zeros(32, 5, dtype=torch.int64)
    for sample, length in enumerate(lengths):
        targets[sample, length:] = -100
    return torch.randn(32, 8), targets


@pytest.mark.parametrize(
    ("facts", "given", "is_warned"),
    [
        ({}, {}, True),
        ({"allow_accumulation_change": True}, {}, False),
        ({}, {"loss_weight": lambda batch: len(batch[0])}, False),
    ],
)
def test_micro_batches_that_ignore_unequal_shares_are_warned_of_once(
    record: Record, facts: dict[str, Any], given: dict[str, Any], is_warned: bool
) -> None:
    """Each of 4 samples; the first of the second batch has 10 of 20 targets that are valid."""
    asked = replace(record, workload={**record.workload, **facts})
    batches = _padded(*[3] * 32), _padded(0, 0, 5, 5), _padded(1, 2, 3)
    words = [r"\[1\].* 2\.5 targets.*-100.* 5 in.*loss_weight"] * is_warned
    warned = _step(asked, *batches, **given)
    assert [bool(re.search(*pair)) for pair in zip(words, warned, strict=True)] == [
        True
    ] * is_warned


def baseline_of(record: Record) -> Report:
    """The report whose best plan is the baseline: 4 x 8 samples of 8 numbers."""
    return Report(replace(record, best_number=0, recommended_number=0))


def linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(8, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
