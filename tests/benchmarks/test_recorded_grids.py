"""The recorded grids as worlds: what was recorded is what a prober of them answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.checks.card_table import ERROR_90TH, MEDIAN_ERROR
from autofit.measurement import Outcome
from autofit.plan import ResolvedPlan, variant_key
from autofit.probing.messages import ProbeRequest
from benchmarks.grids import recorded
from benchmarks.grids.recorded import WORKLOADS, grid_world
from benchmarks.grids.roofline import best_plans, lines, standing

GRID_FILE = Path(recorded.__file__).with_name("h200.jsonl")
DTYPES = {"fp32": "default", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}
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
            "memory_format.layout": "channels_last" if line["channels_last"] else "default",
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


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_variant_of_a_grid_has_a_predicted_time(name: str) -> None:
    world = grid_world(name)
    times = world.spec(times=True).predicted_times
    assert set(times) == set(world.rows)
    assert all(fixed > 0 and per_sample > 0 for fixed, per_sample in times.values())
    assert world.spec(lines=True).predicted_times == {}


def test_the_written_times_are_those_of_a_dry_run() -> None:
    world = grid_world("gpt2_small")
    variant = variant_key({"precision.dtype": "bfloat16", "checkpointing.level": 1})
    one = replace(world, rows={variant: world.rows[variant]})
    assert dict(lines(one))[variant] == pytest.approx(
        world.spec(times=True).predicted_times[variant], rel=0.01
    )


def test_the_error_that_a_table_of_cards_states_is_that_of_the_worse_grid() -> None:
    worlds = [grid_world(name) for name in WORKLOADS]
    found = [standing(world, world.spec(times=True).predicted_times) for world in worlds]
    for stated, name in ((MEDIAN_ERROR, "error_median"), (ERROR_90TH, "error_90th")):
        assert stated - 0.01 < max(each[name] for each in found) <= stated


def test_a_standing_compares_ratios_alone() -> None:
    world = grid_world("gpt2_small")
    exact = {
        variant: (1e-12, 3 * world.step_time(plan) / plan.micro_batch)
        for variant, plan in best_plans(world).items()
    }
    found = standing(world, exact)
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert found["error_90th"] == pytest.approx(0.0, abs=1e-6)
    assert found["share_of_best"] == 1.0
    worst = {variant: (fixed, 1 / each) for variant, (fixed, each) in exact.items()}
    assert standing(world, worst)["rank_correlation"] == pytest.approx(-1.0)
