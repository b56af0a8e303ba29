"""The recorded grids as worlds: what was recorded is what a prober of them answers."""

from __future__ import annotations

import pytest

from autofit.measurement import Outcome
from autofit.plan import ResolvedPlan
from autofit.probing.messages import ProbeRequest
from benchmarks.grids.recorded import WORKLOADS, grid_world


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_recorded_plan_has_its_recorded_speed_and_end(name: str) -> None:
    world = grid_world(name)
    seen = 0
    for settings in world.space.variants():
        for row in world.rows[world.space.plan(1, settings).variant]:
            plan = world.space.plan(row.micro_batch, settings)
            if row.seconds is None:
                assert not world.fits(plan)
            else:
                assert world.fits(plan)
                assert world.speed(plan) == pytest.approx(row.micro_batch / row.seconds)
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
