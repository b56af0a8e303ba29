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


def test_the_loader_is_the_bottleneck(record: Record) -> None:
    line = text(record, loader=LOADER)
    for kept in (
        "The loader is slower than the device, and fastest with num_workers=4 (yours: 0)",
        "the best plan consumes 200 samples/s",
        "28.0 samples/s with 0, 110 samples/s with 4 workers",
        "rows are longer",
    ):
        assert kept in line


def test_why_workers_stay_as_they_are_is_told(record: Record) -> None:
    line = text(record, loader=LOADER | {"keeps_workers": True, "own_workers": 4})
    assert "num_workers stays 4" in line
    assert "stays" not in text(record, loader=LOADER)


def test_a_loader_that_keeps_up(record: Record) -> None:
    line = text(record, loader=LOADER | {"bottleneck": "device", "own_workers": 4})
    assert "keeps the device busy with num_workers=4" in line
    assert "slower" not in line
    assert "yours" not in line


def test_a_loader_that_failed_at_once_and_on_the_way(record: Record) -> None:
    nothing: dict[str, Any] = {"num_workers": None, "bottleneck": None, "warnings": []}
    failed = LOADER | nothing | {"failed": "ValueError: torn\nsecond line"}
    line = text(record, loader=failed)
    assert "consumes 200 samples/s" in line
    assert "110 samples/s with 4 workers" in line
    assert "not measured to the end: ValueError: torn" in line
    assert "second line" not in line
    caught = "OSError: Caught OSError in DataLoader worker process 0.\nTraceback\nOSError: no disk"
    assert "to the end: OSError: no disk" in text(record, loader=failed | {"failed": caught})
    assert "delivers" not in text(record, loader=failed | {"delivered": []})


def test_what_takes_most_of_a_step(record: Record) -> None:
    bounds = {"best": BEST, "baseline": BEST | {"arithmetic": 0.2, "memory traffic": 0.6}}
    line = text(record, bounds=bounds)
    assert "best plan is 50% arithmetic, 30% memory traffic" in line
    assert "of the baseline 60% memory traffic, 20% arithmetic" in line
    assert "could not be profiled: RuntimeError: busy" in text(
        record, bounds={"failed": "RuntimeError: busy"}
    )
    assert "could not be profiled" in text(record, bounds={"best": None})


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
