"""Reads `traces.jsonl.gz`: 30 trainings recorded on an H200 with torch 2.11 and CUDA 13.0.

Each recording has the peaks of a plain run, the smallest limits on segment bytes under which the
training ran (bisected to 1 %), and every allocation of two optimizer steps of a traced run with
the operator it happened in.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.memory.replay import Event, Recording

_FILE = Path(__file__).with_name("traces.jsonl.gz")
_INPUT_OPS = ("aten.randint", "aten.randn")
_UPDATE_OPS = ("aten._foreach_addcdiv", "aten._fused_", "aten.addcdiv_", "aten._foreach_add_")


@dataclass(frozen=True)
class RecordedTraining:
    """One training as it was recorded.

    Attributes:
        name: the case, as in `models.py`.
        peak_allocated_bytes: of a plain run of three steps.
        peak_reserved_bytes: likewise.
        traced_allocated_bytes: the peak of the traced run, which `recording` came from.
        traced_reserved_bytes: likewise.
        smallest_limit_bytes: the smallest limit without an allocator retry in the last two of
            four steps.
        recording: the allocations of the traced run.
        operators: the aten operators of the traced run, in order.
        scratch_sizes: for each operator, the bytes of what was allocated and released again before
            the next one.
    """

    name: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    traced_allocated_bytes: int
    traced_reserved_bytes: int
    smallest_limit_bytes: int
    recording: Recording
    operators: tuple[str, ...]
    scratch_sizes: tuple[list[int], ...]


def recorded_trainings() -> Iterator[RecordedTraining]:
    """All of them, in the order of the file."""
    with gzip.open(_FILE, "rt") as lines:
        for line in lines:
            yield _read(json.loads(line))


def _read(data: dict[str, Any]) -> RecordedTraining:
    events = [(number, size) for number, size in data["events"]]
    first_end = _first_step_end(data)
    return RecordedTraining(
        data["case"],
        data["allocated"],
        data["reserved"],
        data["traced_allocated"],
        data["traced_reserved"],
        data["cap_no_retry"],
        Recording(events, (first_end, _second_step_end(data, events, first_end))),
        tuple(data["op_names"][name] for name, _, _ in data["ops"]),
        tuple(_scratch_sizes(data, events)),
    )


def _scratch_sizes(data: dict[str, Any], events: list[Event]) -> Iterator[list[int]]:
    starts = [allocations + releases for _, allocations, releases in data["ops"]]
    for start, end in zip(starts, [*starts[1:], starts[-1]], strict=True):
        released = {-number for number, _ in events[start:end] if number < 0}
        yield [size for number, size in events[start:end] if number in released]


def _first_step_end(data: dict[str, Any]) -> int:
    """How many events lie before the first operator that makes the second step's input."""
    updated = False
    for name, allocations, releases in data["ops"]:
        op = data["op_names"][name]
        updated = updated or op.startswith(_UPDATE_OPS)
        if updated and op.startswith(_INPUT_OPS):
            # Releases that only happen at the boundary are counted before this operator too.
            return int(allocations + releases)
    raise ValueError(f"{data['case']}: no second step was found")


def _second_step_end(data: dict[str, Any], events: list[Event], first_end: int) -> int:
    """How many events lie before the training is torn down, which frees what it was built with."""
    before_second_step = {number for number, _ in events[:first_end]}
    _, allocations, releases = data["ops"][-1]
    for at in range(allocations + releases, len(events)):
        if -events[at][0] in before_second_step:
            return at
    return len(events)
