"""Exclusions that follow from faults of earlier probes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, Scalar
from autofit.planning.feasibility import Sizes, exclusions_of
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.units import GIB
from tests.simulated import (
    HALF,
    PLAIN,
    SimulatedDevice,
    make_trial,
)


def test_a_plan_that_ran_out_of_memory_bounds_its_variant(device: SimulatedDevice) -> None:
    spec = device.spec()
    trials = [
        make_trial(
            0, Plan(4, settings=PLAIN), step_times_s=[0.1] * 6, peak_reserved_bytes=2 * 2**30
        ),
        make_trial(1, Plan(16, settings=PLAIN), Outcome.OOM),
    ]
    found = exclusions_of(spec, trials)
    assert found.bound(PLAIN) == 15
    assert found.bound(HALF) is None


def test_memory_that_another_process_took_bounds_no_size_that_fits(device: SimulatedDevice) -> None:
    trials = [
        make_trial(0, Plan(4, settings=PLAIN), step_times_s=[0.1]),
        make_trial(1, Plan(20, settings=HALF), step_times_s=[0.1]),
        make_trial(2, Plan(16, settings=HALF), Outcome.OOM, contended=True),
    ]
    assert exclusions_of(device.spec(), trials).bound(HALF) is None
    larger = make_trial(3, Plan(24, settings=HALF), Outcome.OOM, contended=True)
    assert exclusions_of(device.spec(), [*trials, larger]).bound(HALF) == 23


def test_a_whole_batch_that_fits_does_not_say_that_gradients_fit_beside_a_smaller_one() -> None:
    spec = SearchSpec(Space({}, 4, global_batch=24), GIB)
    trials = [
        make_trial(0, spec.space.plan(24, {}), step_times_s=[0.1]),
        make_trial(1, spec.space.plan(12, {}), Outcome.OOM, contended=True),
    ]
    assert dict(exclusions_of(spec, trials).accumulating) == {(): 11}


def test_a_fault_is_blamed_on_what_never_worked(device: SimulatedDevice) -> None:
    both: dict[str, Scalar] = {"precision.dtype": "bfloat16", "checkpointing.level": 2}
    trials = [
        make_trial(0, Plan(4, settings=PLAIN), step_times_s=[0.1]),
        make_trial(
            1, Plan(4, settings=both), Outcome.NONFINITE, detail="loss nan", step_times_s=[0.1]
        ),
    ]
    found = exclusions_of(device.spec(), trials)
    assert found.why(both) == "nonfinite: loss nan"
    assert found.why(HALF) is None
    level_works = make_trial(
        2, Plan(4, settings={**PLAIN, "checkpointing.level": 2}), step_times_s=[0.1]
    )
    assert exclusions_of(device.spec(), [*trials, level_works]).why(HALF) is not None


def test_a_small_micro_batch_that_fails_is_not_the_variants_fault(device: SimulatedDevice) -> None:
    trials = [
        make_trial(0, Plan(4, settings=PLAIN), step_times_s=[0.1]),
        make_trial(1, Plan(1, settings=HALF), Outcome.UNSUPPORTED, detail="BatchNorm"),
    ]
    found = exclusions_of(device.spec(), trials)
    assert found.why(HALF) is None
    assert found.least(HALF) == 4


def test_a_small_size_that_fails_with_nothing_in_common_is_to_blame(
    device: SimulatedDevice,
) -> None:
    """As of BatchNorm, which refuses one sample, where the baseline does not fit."""
    level: dict[str, Scalar] = {**PLAIN, "checkpointing.level": 2}
    both: dict[str, Scalar] = {**HALF, "checkpointing.level": 2}
    trials = [
        make_trial(0, Plan(4, settings=PLAIN), Outcome.OOM),
        make_trial(1, Plan(1, settings=both), Outcome.UNSUPPORTED, detail="one sample"),
        make_trial(2, Plan(1, settings=HALF), Outcome.UNSUPPORTED, detail="one sample"),
    ]
    found = exclusions_of(device.spec(), trials)  # half precision may be to blame
    assert [found.least(each) for each in (both, HALF, level)] == [4, 4, 1]
    trials.append(make_trial(3, Plan(1, settings=level), Outcome.UNSUPPORTED, detail="one sample"))
    found = exclusions_of(device.spec(), trials)
    assert [found.least(each) for each in (both, HALF, level, PLAIN)] == [2, 2, 2, 2]


def test_a_size_that_several_variants_are_refused_bounds_what_they_share(
    device: SimulatedDevice,
) -> None:
    second: dict[str, Scalar] = {**HALF, "checkpointing.level": 2}
    other: dict[str, Scalar] = {**PLAIN, "checkpointing.level": 2}
    trials = [
        make_trial(0, Plan(4, settings=PLAIN), step_times_s=[0.1]),
        make_trial(1, Plan(64, settings=HALF), Outcome.SIZE_LIMIT),
        make_trial(2, Plan(32, settings=second), Outcome.SIZE_LIMIT),
    ]
    third: dict[str, Scalar] = {**HALF, "checkpointing.level": 1}
    one = exclusions_of(device.spec(), trials[:2])
    assert one.bound(third) is None
    both = exclusions_of(device.spec(), trials)
    assert (both.bound(second), both.bound(third), both.bound(other)) == (31, 63, None)
    everywhere = [*trials, make_trial(3, Plan(21, settings=PLAIN), Outcome.SIZE_LIMIT)]
    assert exclusions_of(device.spec(), everywhere).bound(other) == 31
    disproved = [*everywhere, make_trial(4, Plan(100, settings=third), step_times_s=[0.1])]
    assert exclusions_of(device.spec(), disproved).bound(third) is None
    memory = [replace(trial, measurement=Measurement(Outcome.OOM)) for trial in trials[1:]]
    assert exclusions_of(device.spec(), [trials[0], *memory]).bound(third) is None


@pytest.mark.parametrize("outcome", [Outcome.SIZE_LIMIT, Outcome.HOST_OOM])
def test_a_value_that_is_refused_at_two_sizes_is_to_blame_itself(
    device: SimulatedDevice, outcome: Outcome
) -> None:
    level: dict[str, Scalar] = {**HALF, "checkpointing.level": 2}
    trials = [
        make_trial(0, Plan(8, settings=PLAIN), step_times_s=[0.1]),
        make_trial(1, Plan(32, settings=HALF), outcome, detail="no kernel"),
        make_trial(2, Plan(6, settings=level), outcome, detail="no kernel"),
        make_trial(3, Plan(4, settings=HALF), outcome, detail="no kernel"),
    ]
    assert exclusions_of(device.spec(), trials[:2]).why(HALF) is None
    assert exclusions_of(device.spec(), trials[:3]).why(HALF) is None  # the level may be to blame
    after = exclusions_of(device.spec(), trials)
    assert after.why(HALF) == after.why(level) == f"{outcome.value}: no kernel"
    assert after.why(PLAIN) is None
    works = make_trial(4, Plan(2, settings=HALF), step_times_s=[0.1])
    assert exclusions_of(device.spec(), [*trials, works]).why(HALF) is None


def test_a_value_that_was_refused_at_larger_sizes_than_ran_alone_is_tried_at_smaller(
    device: SimulatedDevice,
) -> None:
    trials = [
        make_trial(0, Plan(8, settings=PLAIN), step_times_s=[0.1]),
        make_trial(1, Plan(64, settings=HALF), Outcome.SIZE_LIMIT),
        make_trial(2, Plan(32, settings=HALF), Outcome.SIZE_LIMIT),
    ]
    assert exclusions_of(device.spec(), trials).why(HALF) is None


def test_a_search_gives_a_value_up_that_no_size_runs_with(device: SimulatedDevice) -> None:
    def fault(plan: Plan) -> Measurement | None:
        fails = plan.settings["precision.dtype"] == "bfloat16"
        return Measurement(Outcome.SIZE_LIMIT, detail="no kernel") if fails else None

    prober = device.prober(fault=fault)
    run_search(prober, device.spec())
    failed = [r.plan for r in prober.probed if r.plan.settings["precision.dtype"] == "bfloat16"]
    assert 1 <= len(failed) <= 3


def test_sizes_are_those_of_the_plans_of_the_space() -> None:
    wanted = range(14)
    for even in (False, True):
        space = Space({}, 5, global_batch=12, even_split=even)
        sizes = Sizes(space, [1, 4])
        plans = [space.plan(size, {}).micro_batch if size else 0 for size in wanted]
        down = sizes.down(np.array([[size, size] for size in wanted], dtype=np.float64))
        assert down[:, 0].tolist() == plans
        assert down[:, 1].tolist() == [size if size >= 4 else 0 for size in plans]
        assert Sizes(space, [5]).smallest.tolist() == [6]
