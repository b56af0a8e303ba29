"""The recorded grids as worlds: what was recorded is what a prober of them answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autofit.measurement import Outcome
from autofit.plan import ResolvedPlan
from autofit.probing.messages import ProbeRequest
from benchmarks.grids import recorded
from benchmarks.grids.recorded import WORKLOADS, grid_world

GRID_FILE = Path(recorded.__file__).with_name("h200.jsonl")
DTYPES = {"fp32": "as_is", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}
LEVELS = {0.0: 0, 0.5: 1, 1.0: 2}


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_recorded_plan_has_its_recorded_speed_and_end(name: str) -> None:
    world = grid_world(name)
    seen = 0
    for line in map(json.loads, GRID_FILE.read_text().splitlines()):
        if line["workload"] != name:
            continue
        settings = {
            "precision.dtype": DTYPES[line["precision"]],
            "memory_format.layout": "channels_last" if line["channels_last"] else "as_is",
            "checkpointing.level": LEVELS[line["checkpointed"]],
        }
        dimensions = world.space.dimensions
        settings = {key: value for key, value in settings.items() if key in dimensions}
        plan = world.space.plan(line["micro_batch"], settings)
        assert world.fits(plan) is (line["outcome"] == "ok")
        if line["outcome"] == "ok":
            assert world.speed(plan) == pytest.approx(line["samples_per_second"], rel=1e-4)
        seen += 1
    assert seen == {"gpt2_small": 80, "resnet50": 168}[name]


def test_a_plan_between_two_recorded_ones_is_between_them() -> None:
    world = grid_world("gpt2_small")
    plain = world.space.plain_settings
    slow, between, fast = (world.speed(world.space.plan(size, plain)) for size in (2, 3, 4))
    assert slow < between < fast


def test_a_prober_of_a_grid_runs_out_of_memory_where_the_gpu_did() -> None:
    world = grid_world("gpt2_small")
    prober = world.prober()
    plain = world.space.plain_settings
    fits, too_large = (world.space.plan(size, plain) for size in (16, 24))
    assert prober.probe(ProbeRequest(ResolvedPlan(fits))).measurement.outcome is Outcome.OK
    assert prober.probe(ProbeRequest(ResolvedPlan(too_large))).measurement.outcome is Outcome.OOM
