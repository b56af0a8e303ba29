"""The worlds in which searches are held against what a person picks."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import expert_worlds as worlds
from benchmarks.formula_worlds import PRECISION, compiled, nonmonotone


@pytest.mark.parametrize("group", sorted(worlds.GROUPS))
def test_no_plan_of_a_person_is_faster_than_the_best(group: str) -> None:
    world, again = worlds.GROUPS[group](3), worlds.GROUPS[group](3)
    interpolated = 1.1 if isinstance(world, worlds.Grid) else 1 + 1e-9
    assert 0 < worlds.expert(world) <= interpolated * world.optimum()
    assert worlds.expert(again) == worlds.expert(world), "a seed is a world"


def test_a_person_takes_the_largest_size_that_fits_though_smaller_ones_fail() -> None:
    world = nonmonotone(5)
    settings = {**world.space.default_settings, PRECISION: "bfloat16"}
    plans = [world.space.plan(size, settings) for size in range(1, 49)]
    fitting = [plan for plan in plans if world.fits(plan)]
    assert any(not world.fits(plan) for plan in plans[: fitting[-1].micro_batch])
    assert worlds._largest_speed(world, settings) == world.speed(fitting[-1])


def test_what_costly_values_take_to_start_counts_in_their_speed() -> None:
    world = compiled(1)
    plain = world.space.plan(8, world.space.default_settings)
    costly = world.space.plan(8, {**plain.settings, "compile.mode": "default"})
    assert world.speed(plain) == pytest.approx(plain.samples_per_step / world.step_time(plain))
    assert world.speed(costly) < costly.samples_per_step / world.step_time(costly)


@pytest.mark.parametrize("planned_steps", [None, 0, 10_000])
def test_costly_values_are_searched_where_steps_are_planned(planned_steps: int | None) -> None:
    spec = worlds._asked(compiled(1).spec(), planned_steps)
    is_costly = any(spec.space.is_costly(settings) for settings in spec.space.variants())
    assert is_costly == bool(planned_steps)
    assert spec.planned_samples == (64 * planned_steps if planned_steps else None)


def test_a_search_that_was_written_down_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds: dict[str, Any] = {"groups": ["saturated"], "devices": 0, "formulas": 2, "grids": 0}
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
    capsys.readouterr()
    worlds.print_tables([given.json, other])
    assert f"{tmp_path}/other | +0.00 ± 0.00 |" in capsys.readouterr().out
