"""What was found beside the answer, in sentences."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from autofit.codec import to_json
from autofit.errors import InvalidRequest
from autofit.plan import Dimension, Plan
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
    return " ".join(render(found).split())


def test_the_loader_is_the_bottleneck_and_by_how_much(record: Record) -> None:
    assert (
        "Loader: num_workers=4, prefetch_factor=2, pin_memory=False: 110 samples/s end to end, "
        "where the plan consumes 200 samples/s by itself: the loader, not the device, is the "
        "bottleneck (45% of the plan's speed is lost); with num_workers=0, pin_memory=False it is "
        "28.0 samples/s; it takes 96.0 MiB of host memory; rows are longer"
    ) in text(record, loader=LOADER)


def test_speeds_have_no_more_digits_than_the_plans_own(record: Record) -> None:
    noisy = replace(record.best.measurement, step_times_s=[0.2, 0.3, 0.2, 0.3, 0.2, 0.3])
    trials = [replace(t, measurement=noisy) if t is record.best else t for t in record.trials]
    found = {**LOADER, "consumed_samples_per_second": 187.3}
    line = text(replace(record, trials=tuple(trials)), loader=found)
    assert "the plan consumes 190 samples/s by itself" in line


def test_workers_at_the_most_that_are_tried_are_told(record: Record) -> None:
    assert "lost); more workers were not tried;" in text(
        record, loader=LOADER | {"most_workers": 4}
    )


def test_why_workers_stay_as_they_are_is_told(record: Record) -> None:
    line = text(record, loader=LOADER | {"keeps_workers": True, "own_settings": FOUR})
    assert "num_workers stays 4, since each worker has its own copy of an IterableDataset" in line
    assert "stays" not in text(record, loader=LOADER | {"keeps_workers": False})


def test_a_loader_that_keeps_up(record: Record) -> None:
    kept = {"settings": FOUR, "samples_per_second": 198.0, "warnings": []}
    found = LOADER | {"bottleneck": "device", "own_settings": FOUR, "end_to_end": [kept]}
    line = text(record, loader=found)
    assert "the device is the bottleneck; it takes 96.0 MiB" in line
    assert "lost" not in line


def test_a_loader_that_failed_at_once_and_on_the_way(record: Record) -> None:
    nothing: dict[str, Any] = {
        "settings": None,
        "bottleneck": None,
        "host_bytes": None,
        "end_to_end": [],
    }
    failed = LOADER | nothing | {"failed": "ValueError: torn\nsecond line"}
    assert (
        "Loader: the plan consumes 200 samples/s and the loader alone delivers 30.0 samples/s; "
        "not measured to the end: ValueError: torn"
    ) in text(record, loader=failed)
    caught = "OSError: Caught OSError in DataLoader worker process 0.\nTraceback\nOSError: no disk"
    assert "to the end: OSError: no disk" in text(record, loader=failed | {"failed": caught})
    assert "Loader: the plan consumes 200 samples/s; not measured" in text(
        record, loader=failed | {"delivered": []}
    )
    assert "host memory; rows are longer; not measured to the end: the time" in text(
        record, loader=LOADER | {"failed": "the time of the search was over"}
    )


def test_what_takes_most_of_a_step_and_which_setting_addresses_it(record: Record) -> None:
    bounds = {"best": BEST, "baseline": BEST | {"arithmetic": 0.4, "memory traffic": 0.4}}
    shares = (
        "A step of the best plan: 50% arithmetic, 30% memory traffic, 15% launches, 5% optimizer; "
        "of the baseline: 40% arithmetic, 40% memory traffic, 15% launches, 5% optimizer. Most of "
        "it goes to arithmetic (products, convolutions, attention)"
    )
    assert f"{shares}; no setting of this search addresses that" in text(record, bounds=bounds)
    levels = Dimension([0, 1, 2], payloads={1: ["a"], 2: ["b"]}, addresses=("arithmetic",))
    addressed = replace(record, dimensions={"folding.level": levels})
    assert f"{shares}, which is addressed by folding.level (in the best plan 1)" in text(
        addressed, bounds=bounds
    )


def test_what_bounds_a_step_may_not_be_known(record: Record) -> None:
    assert "step is not known: the profiler saw no operator" in text(record, bounds={"best": None})
    assert "step is not known: RuntimeError: busy" in text(
        record, bounds={"failed": "RuntimeError: busy"}
    )


def test_expandable_segments_are_recommended_only_where_they_help(record: Record) -> None:
    tried = {
        "setting": "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "lowers_required_bytes": True,
        "held_bytes": 3 * GIB,
        "held_bytes_with": 2 * GIB,
        "plan_without_retries": None,
    }
    assert (
        "Set PYTORCH_ALLOC_CONF=expandable_segments:True: the best plan then runs in 2.00 GiB, and "
        "without it does not fit in that (it held 3.00 GiB)"
    ) in text(record, allocator=tried)
    tried["lowers_required_bytes"] = False
    assert "expandable_segments:True does not lower what" in text(record, allocator=tried)
    tried["plan_without_retries"] = to_json(Plan(64))
    assert "Set PYTORCH_ALLOC_CONF=expandable_segments:True: 64 x 1, which is faster" in text(
        record, allocator=tried
    )
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


def test_what_the_state_of_the_optimizer_takes(record: Record) -> None:
    found = {
        "optimizer": "AdamW",
        "parameter_bytes": 4 * MIB,
        "state_bytes": 8 * MIB,
        "bytes_in_8_bits": 2 * MIB,
        "adafactor_bytes": 16 * 1024,
        "lion_bytes": 4 * MIB,
    }
    line = text(record, state=found)
    assert "the state of AdamW takes 8.00 MiB beside 4.00 MiB of trained parameters" in line
    assert "in 8-bit codes it would take 2.00 MiB" in line
    assert "no setting: Adafactor 16.0 KiB, Lion 4.00 MiB" in line
    assert "Optimizer:" not in text(record, state=found | {"state_bytes": 0})
    assert "state takes is not known: no time" in text(record, state={"failed": "no time"})
