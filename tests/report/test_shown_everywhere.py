"""What every form of a report shows: levels in words, what is decided, and no text cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autofit.measurement import RankUse
from autofit.plan import Dimension, Scalar
from autofit.report.page import cell, page
from autofit.report.record import Record, Undecided
from autofit.report.report import Report
from autofit.report.summary import held_by_ranks
from autofit.report.text import markdown, render

LABELS: dict[Scalar, str] = {1: "recompute 1 of 12 blocks", 2: "recompute\n2 of 12 blocks"}
IN_WORDS = "folding.level=1 (recompute 1 of 12 blocks)"


@pytest.fixture
def labelled(record: Record) -> Record:
    levels = replace(record.dimensions["folding.level"], labels=LABELS)
    return replace(record, dimensions={**record.dimensions, "folding.level": levels})


@pytest.mark.parametrize(
    "form",
    [render, lambda record: render(record, 200, verbose=True), markdown, page, cell],
    ids=["text", "all text", "markdown", "page", "cell"],
)
def test_a_number_that_stands_for_something_says_what(labelled: Record, form: Any) -> None:
    shown = form(labelled).replace("<wbr>", "")
    assert IN_WORDS in shown


def test_a_point_of_a_chart_says_what_its_numbers_mean(labelled: Record) -> None:
    assert f"<title>16 x 2, {IN_WORDS}" in Report(labelled).plot()


def test_what_was_tried_is_explained_on_one_line(labelled: Record) -> None:
    lines = render(labelled, 200, verbose=True).partition("What settings mean")[2].splitlines()
    meant = [line.split(maxsplit=1) for line in lines if line.startswith("folding")]
    assert meant[:2] == [
        ["folding.level=1", "recompute 1 of 12 blocks"],
        ["folding.level=2", "recompute 2 of 12 blocks"],
    ]
    assert not any(line.startswith("folding.level=0") for line in lines)


def test_labels_are_read_again(labelled: Record) -> None:
    read = Record.from_dict(Report(labelled).to_dict())
    assert read.dimensions["folding.level"].labels == LABELS
    assert Dimension([0, 1]).labels == {}


def test_no_time_of_training_is_shown_where_nothing_is_decided(record: Record) -> None:
    search = replace(record.search, planned_samples=3_600_000, epoch_samples=7200)
    decided = render(replace(record, search=search), verbose=True)
    assert "training of 3,600,000 samples" in decided
    undecided = replace(search, undecided_because=Undecided.NOISE)
    shown = render(replace(record, search=undecided), 200, verbose=True)
    assert "training of" not in shown
    assert [line.split()[-2:] for line in shown.splitlines() if line.startswith("epoch of")] == [
        ["not", "decided"]
    ]


def test_a_long_title_is_wrapped(record: Record) -> None:
    name = " ".join(["long"] * 30)
    shown = render(replace(record, workload={**record.workload, "target": name}), 60)
    assert name in " ".join(shown.split())
    assert "\u2026" not in shown


def test_plans_that_did_not_fit_are_drawn_however_far_the_budget_is(record: Record) -> None:
    near, far = page(record), page(replace(record, vram_budget_bytes=2**40))
    assert near.count('class="failed"') == far.count('class="failed"') == 1
    assert ('class="budget"' in near, 'class="budget"' in far) == (True, False)


def test_ranks_that_hold_the_same_are_not_a_range() -> None:
    same, more = (RankUse(0, size, 0, 0.1) for size in (2**20, 2**21))
    assert held_by_ranks([same, same]) == "1.00 MiB each"
    assert held_by_ranks([same, more]) == "1.00 MiB to 2.00 MiB (rank 1 most)"
