"""Recorded plans of an H200 on the emulated one: what fits, and what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.emulated

Run = Any
PLANS = """
import json, sys
from dataclasses import asdict
from benchmarks.emulation_grids import answered
from benchmarks.grids.recorded import recorded_plans
wanted = [tuple(plan) for plan in json.loads(sys.argv[1])]
keys = "workload", "micro_batch", "precision", "checkpointed", "channels_last"
rows = {tuple(row[key] for key in keys): row for row in recorded_plans()}
print(json.dumps([asdict(answered(rows[plan])) for plan in wanted]))
"""


def _answers(run_on: Run, *plans: tuple[str, int, str, float, bool]) -> list[dict[str, Any]]:
    return json.loads(run_on(PLANS, json.dumps(plans)))


def test_a_recorded_decoder_takes_the_recorded_bytes(run_on: Run) -> None:
    plans = [("gpt2_small", size, "fp32", 0.0, False) for size in (2, 24)]
    first, last = _answers(run_on, *plans)
    assert first["allocated_error"] == first["reserved_error"] == 0
    assert last["recorded"] == last["emulated"] == "oom"


def test_a_convolution_without_room_for_its_workspace_runs_without(run_on: Run) -> None:
    """Float32 in channels last copies its operands; with no room, a tensor runs out, not cuDNN."""
    (answer,) = _answers(run_on, ("resnet50", 192, "fp32", 0.0, True))
    assert answer["recorded"] == answer["emulated"] == "oom"
