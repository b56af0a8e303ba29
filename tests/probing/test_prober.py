"""What every prober has in common."""

from __future__ import annotations

import pytest

from autofit.errors import WorkloadFailed
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan
from autofit.probing.prober import ProbeRequest, users_error
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
    error = users_error(prober, prober.probe(ProbeRequest(Plan(1))))
    assert isinstance(error, WorkloadFailed)
    assert str(error) == words


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.USER_ERROR}))
def test_every_other_ending_is_no_error_of_the_users_code(outcome: Outcome) -> None:
    prober = SimulatedProber(1, lambda plan: 0, lambda plan: 1.0)
    assert users_error(prober, Measurement(outcome)) is None
