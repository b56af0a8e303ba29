"""What is believed of plans that other workers are running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autofit.measurement import Outcome, TrialKind
from autofit.plan import Plan
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
