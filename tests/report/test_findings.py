"""What was found beside the answer, in sentences."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from autofit.errors import InvalidArgument
from autofit.report.record import Record
from autofit.report.text import render

LOADER: dict[str, Any] = {
    "own_workers": 0,
    "consumed_samples_per_second": 200.0,
    "delivered": [
        {"num_workers": 0, "samples_per_second": 28.0},
        {"num_workers": 4, "samples_per_second": 110.0},
    ],
    "num_workers": 4,
    "bottleneck": "loader",
    "keeps_workers": False,
    "warnings": ["rows are longer"],
}
BEST = {"arithmetic": 0.5, "memory traffic": 0.3, "launches": 0.15, "optimizer": 0.05}


def text(record: Record, **findings: Any) -> str:
    """Return the report of a record with these findings as one line, after a way through JSON."""
    found = Record.from_dict(json.loads(json.dumps(replace(record, findings=findings).to_dict())))
    assert found.findings == findings
    return " ".join(render(found, 400, verbose=True).split())


NOT_TO_THE_END: dict[str, Any] = {"num_workers": None, "bottleneck": None, "warnings": []}
CAUGHT = "OSError: Caught OSError in DataLoader worker process 0.\nTraceback\nOSError: no disk"


@pytest.mark.parametrize(
    ("findings", "said", "unsaid"),
    [
        (
            {"loader": LOADER},
            ["fastest with num_workers=4 (yours: 0)", "200 samples/s", "28.0 samples/s with 0"],
            "stays",
        ),
        (
            {"loader": LOADER | {"keeps_workers": True, "own_workers": 4}},
            ["num_workers stays 4"],
            "yours: 0",
        ),
        (
            {"loader": LOADER | {"bottleneck": "device", "own_workers": 4}},
            ["keeps the device busy with num_workers=4"],
            "slower",
        ),
        (
            {"loader": LOADER | NOT_TO_THE_END | {"failed": "ValueError: torn\nsecond line"}},
            ["110 samples/s with 4 workers", "not measured to the end: ValueError: torn"],
            "second line",
        ),
        (
            {"loader": LOADER | NOT_TO_THE_END | {"delivered": [], "failed": CAUGHT}},
            ["to the end: OSError: no disk"],
            "delivers",
        ),
        (
            {"bounds": {"best": BEST, "baseline": BEST | {"memory traffic": 0.6}}},
            ["best plan is 50% arithmetic, 30% memory", "baseline 60% memory traffic"],
            "could not",
        ),
        (
            {"bounds": {"failed": "RuntimeError: busy"}},
            ["profiled: RuntimeError: busy"],
            "best plan is",
        ),
        ({"bounds": {"best": None}}, ["could not be profiled"], "best plan is"),
    ],
)
def test_what_was_found_is_said(
    record: Record, findings: dict[str, Any], said: list[str], unsaid: str
) -> None:
    line = text(record, **findings)
    assert [words for words in said if words not in line] == []
    assert unsaid not in line


@pytest.mark.parametrize(
    ("findings", "place"),
    [
        ({"loader": LOADER | {"bottleneck": "the cat"}}, "findings.loader.bottleneck"),
        ({"bounds": {"best": {"arithmetic": "half"}}}, "findings.bounds.best"),
        ({"loader": LOADER | {"delivered": [{}]}}, "findings.loader.delivered"),
    ],
)
def test_findings_that_mean_nothing_are_refused(
    record: Record, findings: dict[str, Any], place: str
) -> None:
    data = replace(record, findings=findings).to_dict()
    with pytest.raises(InvalidArgument, match=place.replace(".", r"\.")):
        Record.from_dict(data)
