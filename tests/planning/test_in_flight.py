"""What is believed of plans that other workers are running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from autofit.planning.posterior import Posterior

from autofit.measurement import Outcome, TrialKind
from autofit.plan import Plan
from autofit.planning import planner
from autofit.planning.planner import NothingLeft, believing
from tests.simulated import MakeDevice, SimulatedDevice, make_trial, measured


def searched(plans: Sequence[Plan]) -> list[tuple[Plan, TrialKind]]:
    return [(plan, TrialKind.SEARCH) for plan in plans]


def test_a_plan_in_flight_is_not_proposed_again(device: SimulatedDevice) -> None:
    posterior = Posterior(device.spec(), measured(device, [device.space.baseline]))
    in_flight: list[Plan] = []
    for _ in range(4):
        decided = planner.decide(believing(posterior, searched(in_flight)))
        assert isinstance(decided, Plan)
        assert decided not in in_flight
        in_flight.append(decided)


def test_a_belief_opens_no_larger_stride(make_device: MakeDevice) -> None:
    """Of 4 samples measured the next are at most 16, whatever is believed of 16."""
    device = make_device(dimensions={})
    larger = device.space.plan(16, {})
    posterior = Posterior(device.spec(), measured(device, [device.space.baseline]))
    believed = believing(posterior, searched([larger]))
    assert believed.largest.tolist() == [16]
    decided = planner.decide(believed)
    assert isinstance(decided, NothingLeft) or decided.micro_batch <= 16
    both = Posterior(device.spec(), measured(device, [device.space.baseline, larger]))
    after: Any = planner.decide(both)
    assert after.micro_batch > 16


def test_while_nothing_fits_workers_try_different_variants(make_device: MakeDevice) -> None:
    device = make_device()
    failed = (make_trial(0, device.space.baseline, Outcome.OOM),)
    posterior = Posterior(device.spec(), failed)
    first: Any = planner.decide(posterior)
    second: Any = planner.decide(believing(posterior, searched([first])))
    assert second.variant != first.variant


def test_a_plan_in_flight_is_believed_to_fit(make_device: MakeDevice) -> None:
    """Whatever this worker would forecast of it: another one found it feasible."""
    device = make_device(dimensions={})
    plans = [device.space.plan(size, {}) for size in (4, 8, 12)]
    posterior = Posterior(device.spec(), measured(device, plans))
    larger = device.space.plan(40, {})
    assert np.median(posterior.held_bytes(larger)) > device.budget
    (believed,) = believing(posterior, searched([larger])).in_flight
    assert believed.ok
    assert believed.measurement.peak_reserved_bytes == device.budget
