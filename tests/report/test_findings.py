"""What was found beside the answer, in sentences."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from autofit.codec import to_json
from autofit.errors import InvalidRequest
from autofit.plan import Plan
from autofit.report.record import Record
from autofit.report.text import render
from autofit.units import GIB, MIB

FOUR = {"batch_size": 32, "num_workers": 4, "pin_memory": False, "prefetch_factor": 2}
NONE = FOUR | {"num_workers": 0, "prefetch_factor": None}
LOADER: dict[str, Any] = {
    "settings": FOUR,
    "own_settings": NONE,
    "bottleneck": "loader",
    "consumed_samples_per_second": 200.0,
    "host_bytes": 96 * MIB,
    "most_workers": 8,
    "delivered": [{"settings": NONE, "samples_per_second": 30.0}],
    "end_to_end": [
        {"settings": FOUR, "samples_per_second": 110.0, "warnings": []},
        {"settings": NONE, "samples_per_second": 28.0, "warnings": ["rows are longer"]},
    ],
}
BEST = {"arithmetic": 0.5, "memory traffic": 0.3, "launches": 0.15, "optimizer": 0.05}


def text(record: Record, **findings: Any) -> str:
    """Return the report of a record with these findings as one line, after a way through JSON."""
    found = Record.from_dict(json.loads(json.dumps(replace(record, findings=findings).to_dict())))
    assert found.findings == findings
    return " ".join(render(found, 400, verbose=True).split())


def test_the_loader_is_the_bottleneck_and_by_how_much(record: Record) -> None:
    line = text(record, loader=LOADER)
    for kept in (
        "The loader is slower than the device: 110 samples/s with num_workers=4",
        "the plan consumes 200 samples/s",
        "28.0 samples/s with your num_workers=0",
        "96.0 MiB of host memory",
        "rows are longer",
    ):
        assert kept in line
    assert "more workers were not tried" not in line
    assert "more workers were not tried" in text(record, loader=LOADER | {"most_workers": 4})


def test_why_workers_stay_as_they_are_is_told(record: Record) -> None:
    line = text(record, loader=LOADER | {"keeps_workers": True, "own_settings": FOUR})
    assert "num_workers stays 4" in line
    assert "stays" not in text(record, loader=LOADER | {"keeps_workers": False})


def test_a_loader_that_keeps_up(record: Record) -> None:
    kept = {"settings": FOUR, "samples_per_second": 198.0, "warnings": []}
    found = LOADER | {"bottleneck": "device", "own_settings": FOUR, "end_to_end": [kept]}
    line = text(record, loader=found)
    assert "keeps the device busy: 198 samples/s" in line
    assert "slower" not in line


def test_a_loader_that_failed_at_once_and_on_the_way(record: Record) -> None:
    nothing: dict[str, Any] = {
        "settings": None,
        "bottleneck": None,
        "host_bytes": None,
        "end_to_end": [],
    }
    failed = LOADER | nothing | {"failed": "ValueError: torn\nsecond line"}
    line = text(record, loader=failed)
    assert "consumes 200 samples/s, and the loader delivers 30.0 samples/s" in line
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


def test_expandable_segments_are_recommended_only_where_they_help(record: Record) -> None:
    setting = "PYTORCH_ALLOC_CONF=expandable_segments:True"
    tried = {
        "setting": setting,
        "lowers_required_bytes": True,
        "held_bytes": 3 * GIB,
        "held_bytes_with": 2 * GIB,
        "plan_without_retries": None,
    }
    helps = f"With {setting} the best plan runs in 2.00 GiB instead of 3.00 GiB"
    assert helps in text(record, allocator=tried)
    tried["lowers_required_bytes"] = False
    assert setting not in text(record, allocator=tried)
    tried["plan_without_retries"] = to_json(Plan(64))
    assert f"With {setting} a faster plan fits: 64 x 1" in text(record, allocator=tried)
    assert "were not tried: the time" in text(record, allocator={"failed": "the time was over"})


@pytest.mark.parametrize(
    ("findings", "place"),
    [
        ({"loader": LOADER | {"bottleneck": "the cat"}}, "findings.loader.bottleneck"),
        ({"bounds": {"best": {"arithmetic": "half"}}}, "findings.bounds.best"),
        ({"allocator": {"plan_without_retries": {}}}, "findings.allocator.plan_without_retries"),
    ],
)
def test_findings_that_mean_nothing_are_refused(
    record: Record, findings: dict[str, Any], place: str
) -> None:
    data = replace(record, findings=findings).to_dict()
    with pytest.raises(InvalidRequest, match=place.replace(".", r"\.")):
        Record.from_dict(data)
