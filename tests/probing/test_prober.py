"""What every prober has in common."""

from __future__ import annotations

import pytest

from autofit.errors import WorkloadFailed
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import MOST_TIMED_STEPS, ProbeRequest, enough_steps, users_error
from autofit.testing import SimulatedProber


@pytest.mark.parametrize(
    ("outcome", "detail", "words"),
    [
        (Outcome.USER_ERROR, "its file is gone", "its file is gone"),
        (Outcome.USER_ERROR, None, "the workload failed"),
    ],
)
def test_a_failure_without_an_exception_is_the_workloads(
    outcome: Outcome, detail: str | None, words: str
) -> None:
    answer = Measurement(outcome, detail)
    prober = SimulatedProber(1, lambda plan: 0, lambda plan: 1.0, fault=lambda plan: answer)
    error = users_error(prober, prober.probe(ProbeRequest(ResolvedPlan(Plan(1)))))
    assert isinstance(error, WorkloadFailed)
    assert str(error) == words


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.USER_ERROR}))
def test_every_other_ending_is_no_error_of_the_users_code(outcome: Outcome) -> None:
    prober = SimulatedProber(1, lambda plan: 0, lambda plan: 1.0)
    assert users_error(prober, Measurement(outcome)) is None


PLAN = Plan(10)
SCATTERED = [0.9, 1.0, 1.1]
"""Seconds; 10 samples each, so between 9.1 and 11.1 samples per second."""


def beside(rate: float | None) -> ProbeRequest:
    return ProbeRequest(ResolvedPlan(PLAN), incumbent_samples_per_second=rate)


@pytest.mark.parametrize(
    ("rate", "enough"),
    [(None, False), (5.0, False), (10.0, False), (11.1, False), (11.2, True), (20.0, True)],
)
def test_a_plan_is_cut_short_only_where_it_is_slower(rate: float | None, enough: bool) -> None:
    assert enough_steps(SCATTERED, beside(rate)) is enough


@pytest.mark.parametrize(("scatter", "enough"), [(0.009, True), (0.011, False)])
def test_an_interval_within_one_percent_is_close_enough(scatter: float, enough: bool) -> None:
    assert enough_steps([1 - scatter, 1.0, 1 + scatter], beside(None)) is enough


def test_fewer_than_three_steps_are_never_enough() -> None:
    assert not enough_steps([1.0, 1.0], beside(1e9))
    assert not enough_steps([9.0, 9.0], beside(None))


def test_there_is_an_end_by_number_and_by_seconds() -> None:
    scattered = [0.1 * factor for factor in (0.5, 1.5)] * MOST_TIMED_STEPS
    assert not enough_steps(scattered[: MOST_TIMED_STEPS - 1], beside(None))
    assert enough_steps(scattered[:MOST_TIMED_STEPS], beside(None))
    assert enough_steps([1.0, 2.0, 3.0], beside(None))


def test_a_number_of_steps_that_was_asked_for_is_the_only_rule() -> None:
    request = ProbeRequest(ResolvedPlan(PLAN), incumbent_samples_per_second=1e9, steps=5)
    assert not enough_steps([10.0] * 4, request)
    assert enough_steps([10.0] * 5, request)
