"""The worlds in which searches are held against what a person picks."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import expert_worlds as worlds
from benchmarks.formula_worlds import PRECISION, FormulaWorld, nonmonotone
from benchmarks.grids.cards import COMPILE, GAINS, compiled_card_world
from benchmarks.grids.recorded import Told


@pytest.mark.parametrize("group", sorted(worlds.GROUPS))
def test_no_plan_of_a_person_is_faster_than_the_best(group: str) -> None:
    world, again = worlds.GROUPS[group](3), worlds.GROUPS[group](3)
    people = dict(worlds.picked(world))
    interpolated = 1 + 1e-9 if isinstance(world, FormulaWorld) else 1.1
    assert 0 <= people["finder"] <= people["by_hand"] <= people["expert"]
    assert 0 < people["expert"] <= interpolated * world.optimum()
    assert dict(worlds.picked(again)) == people, "a seed is a world"


def test_a_person_takes_the_largest_size_that_fits_though_smaller_ones_fail() -> None:
    world = nonmonotone(5)
    settings = {**world.space.default_settings, PRECISION: "bfloat16"}
    plans = [world.space.plan(size, settings) for size in range(1, 49)]
    fitting = [plan for plan in plans if world.fits(plan)]
    assert any(not world.fits(plan) for plan in plans[: fitting[-1].micro_batch])
    assert worlds._largest_speed(world, settings) == world.speed(fitting[-1])


def test_on_a_card_a_compiled_plan_gains_what_is_published_and_is_not_predicted() -> None:
    world = compiled_card_world("gpt2_small", 2, Told.BOTH)
    plain = world.space.plan(8, {**world.space.default_settings, PRECISION: "bfloat16"})
    costly = world.space.plan(8, {**plain.settings, COMPILE: "default"})
    least, most = GAINS["bfloat16"]
    assert least <= world.step_time(plain) / world.step_time(costly) <= most
    assert world.speed(plain) == pytest.approx(plain.samples_per_step / world.step_time(plain))
    assert world.speed(costly) < costly.samples_per_step / world.step_time(costly)
    spec = world.spec()
    for predicted in (spec.predicted_lines, spec.predicted_times):
        assert plain.variant in predicted
        assert costly.variant not in predicted


@pytest.mark.parametrize("planned_steps", [None, 0, 10_000])
def test_costly_values_are_searched_where_steps_are_planned(planned_steps: int | None) -> None:
    world = compiled_card_world("resnet50", 1, Told.BOTH)
    spec = worlds.asked(world, planned_steps)
    is_costly = any(spec.space.is_costly(settings) for settings in spec.space.variants())
    assert is_costly == bool(planned_steps)
    planned = planned_steps * world.step_samples if planned_steps else None
    assert spec.planned_samples == planned


def test_a_search_that_was_written_down_is_not_run_again(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"groups": ["cpu_cast"], "formulas": 2, "grids": 0}
    given = Namespace(json=tmp_path / "rows.jsonl", first=3, planned_steps=None, **kinds)
    worlds.run(given)
    written = given.json.read_text()
    worlds.run(given)
    assert given.json.read_text() == written
    shares = [row.share for row in worlds.rows_of(given.json).values()]
    assert [json.loads(line)["share"] for line in written.splitlines()] == shares
    assert all(0.9 < share <= 1 + 1e-9 for share in shares)
    other = tmp_path / "other.jsonl"
    other.write_text(written)
    worlds.print_tables([given.json, other], tmp_path / "figures.json")
    told = json.loads((tmp_path / "figures.json").read_text())
    assert told["all: rows"] == told["all: other"] == told["cpu_cast: other"]
    assert told["all: rows"]["mean"] == pytest.approx(sum(shares) / 2)
    assert min(shares) <= told["all: rows"]["tenth"] <= told["all: rows"]["mean"]
