"""The simulated device: formulas and noise behind the prober's seam."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.errors import InvalidArgument
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.requests import ProbeRequest
from autofit.testing import SimulatedProber


def _prober(**arguments: object) -> SimulatedProber:
    given = {
        "vram_budget_bytes": 1000,
        "memory": lambda plan: 100 + 10 * plan.micro_batch,
        "step_time": lambda plan: 0.1 + 0.01 * plan.micro_batch,
    } | arguments
    return SimulatedProber(**given)  # type: ignore[arg-type]  # as the test wrote them


def _measured(prober: SimulatedProber, plan: Plan, **more: Any) -> Measurement:
    return prober.probe(ProbeRequest(ResolvedPlan(plan), **more)).measurement


def test_it_answers_by_its_formulas() -> None:
    measurement = _measured(_prober(), Plan(20))
    assert measurement.outcome is Outcome.OK
    assert measurement.held_bytes == 300
    assert measurement.step_time_s == pytest.approx(0.3)


def test_live_tensors_are_all_that_it_holds_or_as_many_as_a_formula_says() -> None:
    fewer = _prober(allocated=lambda plan: 10.5 * plan.micro_batch)
    told = [_measured(prober, Plan(20)) for prober in (_prober(), fewer)]
    assert [each.peak_allocated_bytes for each in told] == [300, 210]
    assert [each.held_bytes for each in told] == [300, 300]


def test_answers_depend_on_the_plan_and_not_on_the_order() -> None:
    first, second = (_prober(memory_noise=0.1, time_noise=0.1, seed=5) for _ in range(2))
    plans = [Plan(n) for n in range(1, 6)]
    forward = {plan: _measured(first, plan) for plan in plans}
    backward = {plan: _measured(second, plan) for plan in reversed(plans)}
    assert forward == backward
    assert _measured(first, plans[0]) != forward[plans[0]]
    assert _measured(_prober(memory_noise=0.1, seed=6), plans[0]) != forward[plans[0]]


def test_renewals_are_counted_and_a_closed_one_refuses() -> None:
    prober = _prober()
    prober.renew()
    assert prober.renewals == 1
    prober.close()
    with pytest.raises(InvalidArgument, match="closed"):
        _measured(prober, Plan(1))


def test_a_budget_must_be_above_zero() -> None:
    with pytest.raises(InvalidArgument, match="vram_budget_bytes"):
        _prober(vram_budget_bytes=0)
