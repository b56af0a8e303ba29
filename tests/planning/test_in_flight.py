"""What is believed of plans that other workers are running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autofit.measurement import Outcome, TrialKind
from autofit.plan import Dimension, Plan
from autofit.planning import planner
from autofit.planning.beliefs import Beliefs
from autofit.planning.planner import NothingLeft, Proposal, believing
from tests.simulated import MakeDevice, SimulatedDevice, make_trial, measured


def searched(plans: Sequence[Plan]) -> list[tuple[Plan, TrialKind]]:
    return [(plan, TrialKind.SEARCH) for plan in plans]


def test_a_plan_in_flight_is_not_proposed_again(device: SimulatedDevice) -> None:
    beliefs = Beliefs(device.spec(), measured(device, [device.space.baseline]))
    in_flight: list[Plan] = []
    for _ in range(4):
        decided = planner.decide(believing(beliefs, searched(in_flight)))
        assert isinstance(decided, Proposal)
        assert decided.plan not in in_flight
        in_flight.append(decided.plan)


def test_a_belief_opens_no_larger_stride(make_device: MakeDevice) -> None:
    """Of 4 samples measured the next are at most 24, whatever is believed of 16."""
    device = make_device(dimensions={})
    larger = device.space.plan(16, {})
    beliefs = Beliefs(device.spec(), measured(device, [device.space.baseline]))
    believed = believing(beliefs, searched([larger]))
    assert believed.largest.tolist() == [16]
    decided = planner.decide(believed)
    assert isinstance(decided, NothingLeft) or decided.plan.micro_batch <= 24
    both = Beliefs(device.spec(), measured(device, [device.space.baseline, larger]))
    assert beliefs.reach.tolist() == believed.reach.tolist() == [24]
    assert Beliefs(device.spec(), both.measured).reach.tolist() > [24]


def test_while_nothing_fits_workers_try_different_variants(make_device: MakeDevice) -> None:
    device = make_device()
    failed = (make_trial(0, device.space.baseline, Outcome.OOM),)
    beliefs = Beliefs(device.spec(), failed)
    first: Any = planner.decide(beliefs)
    second: Any = planner.decide(believing(beliefs, searched([first.plan])))
    assert second.plan.variant != first.plan.variant


def test_a_plan_in_flight_is_believed_to_fit(make_device: MakeDevice) -> None:
    """Whatever this worker would forecast of it: another one found it feasible."""
    device = make_device(dimensions={})
    plans = [device.space.plan(size, {}) for size in (4, 8, 12)]
    beliefs = Beliefs(device.spec(), measured(device, plans))
    larger = device.space.plan(40, {})
    assert beliefs.held.quantile(larger) > device.budget
    (believed,) = believing(beliefs, searched([larger])).pending
    assert believed.ok
    assert believed.measurement.peak_reserved_bytes == device.budget


def _after_a_compilation(make_device: MakeDevice) -> tuple[Beliefs, Plan, Plan]:
    """Beliefs of a plain and a compiled probe of 3 s, less the 80 s that compiling took, not 30."""
    costly = Dimension(("off", "blocks", "whole"), trial_costs_s={"blocks": 30.0, "whole": 60.0})
    device = make_device(dimensions={"compile.mode": costly})
    plain, compiled, whole = (
        Plan(4, settings={"compile.mode": mode}) for mode in ("off", "blocks", "whole")
    )
    timed: dict[str, Any] = {"step_times_s": [0.1] * 10, "peak_reserved_bytes": 1 << 30}
    cold: dict[str, Any] = {"start_up_s": 80.0, "start_is_warm": False}
    trials = [
        make_trial(0, plain, seconds=3.0, **timed),
        make_trial(1, compiled, seconds=83.0, **timed, **cold),
    ]
    return Beliefs(device.spec(), trials), Plan(5, settings=plain.settings), whole


def test_a_forecast_counts_a_compilation_once_and_as_it_was_measured(
    make_device: MakeDevice,
) -> None:
    """Twice the seconds of the one that ran, which took 80 s."""
    beliefs, plain, whole = _after_a_compilation(make_device)
    assert planner.forecast(beliefs, plain).seconds == pytest.approx(4, abs=1.5)
    assert planner.forecast(beliefs, whole).seconds == pytest.approx(164, abs=2)


def test_a_compilation_in_flight_is_believed_to_take_as_long_as_others_show(
    make_device: MakeDevice,
) -> None:
    beliefs, plain, whole = _after_a_compilation(make_device)
    believed = believing(beliefs, searched([plain, whole])).pending
    seconds = [trial.measurement.seconds or 0.0 for trial in believed]
    assert seconds[1] - seconds[0] == pytest.approx(160)
