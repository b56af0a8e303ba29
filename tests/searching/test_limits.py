"""The limits of a search, given its trials, and the checks of its arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.errors import InvalidArgument
from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.searching.limits import (
    COMPARISON_BLOCKS,
    MOST_KEPT,
    Allowance,
    check_search_arguments,
)


def trials(count: int, seconds: float = 1.0) -> list[Trial]:
    """So many probes, and a vetoed proposal, which is none."""
    ran = Measurement(Outcome.OK, step_times_s=[0.1], seconds=seconds)
    roles = [TrialKind.SEARCH] * count + [TrialKind.VETOED]
    return [Trial(number, kind, Plan(4), ran) for number, kind in enumerate(roles)]


def test_a_search_without_limits_is_unlimited() -> None:
    free = Allowance(None, None)
    assert free.spent(trials(1000)) is None
    assert (free.probes_left(trials(3)), free.seconds_left) == (None, None)
    assert not free.time_is_short(trials(3, seconds=1e9), kept_s=1e9)
    assert free.seconds_kept(trials(3), start_s=1.0) == 0.0


@pytest.mark.parametrize(("most", "before_comparison"), [(1, 1), (2, 2), (3, 2), (4, 2), (9, 7)])
def test_probes_are_kept_back_for_the_comparison(most: int, before_comparison: int) -> None:
    """Of the leading plan and the baseline, if another plan than the baseline can be tried."""
    bounded = Allowance(most, None)
    assert bounded.spent(trials(before_comparison)) == f"max_probes={most} was reached"
    assert before_comparison == 1 or bounded.spent(trials(before_comparison - 1)) is None


def test_one_probe_is_kept_back_after_an_earlier_comparison() -> None:
    compared = [replace(trial, kind=TrialKind.CONFIRMATION) for trial in trials(2)[:2]]
    bounded = Allowance(6, None)
    assert bounded.spent([*trials(2), *compared]) is None
    assert bounded.spent([*trials(3), *compared]) == "max_probes=6 was reached"


def test_no_probes_are_left_after_more_than_allowed() -> None:
    assert Allowance(4, None).probes_left(trials(3)) == 1
    assert Allowance(4, None).probes_left(trials(9)) == 0


def test_the_baseline_is_run_whatever_the_limits() -> None:
    assert Allowance(1, 1e-9).spent([]) is None


@pytest.mark.parametrize(
    ("probe_s", "start_s", "short"), [(2.0, 0.0, False), (2.0, 3.0, True), (12.0, 0.0, True)]
)
def test_time_is_short_if_another_probe_would_not_leave_enough_for_the_comparison(
    probe_s: float, start_s: float, short: bool
) -> None:
    bounded = Allowance(None, 60.0, clock=lambda: 35.0, began=0.0)
    reason = bounded.spent(trials(3, probe_s), start_s)
    assert (reason == "the timeout of 60 s was reached") is short


def test_a_share_of_the_time_at_most_is_kept_for_the_comparison() -> None:
    bounded = Allowance(None, 60.0)
    assert bounded.seconds_kept(trials(3, seconds=2.0), start_s=1.0) == COMPARISON_BLOCKS * 3.0
    assert bounded.seconds_kept(trials(3, seconds=40.0), start_s=1.0) == MOST_KEPT * 60.0
    assert bounded.seconds_kept([], start_s=1.0) == 0.0


def test_time_is_kept_for_steps_that_run_all_their_micro_batches() -> None:
    """The search ran 2 of 8 and scaled the time: in full, three quarters of it come on top."""
    part = Measurement(Outcome.OK, step_times_s=[0.4] * 5, seconds=1.0, micro_batches_run=2)
    trial = Trial(0, TrialKind.SEARCH, Plan(4, accumulation_steps=8, global_batch=32), part)
    kept_s = Allowance(None, 60.0).seconds_kept([trial], start_s=0.5)
    assert kept_s == pytest.approx(COMPARISON_BLOCKS * (0.5 + 1.0 + 1.5))


GOOD: dict[str, Any] = {
    "max_probes": 3,
    "timeout": 1.5,
    "study": Path("study.log"),
    "progress": print,
    "planned_steps": 1000,
}


def test_valid_arguments_pass() -> None:
    check_search_arguments(**GOOD)
    check_search_arguments(**dict.fromkeys(GOOD))
    check_search_arguments(**GOOD | {"progress": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_probes", 0),
        ("max_probes", 1.5),
        ("max_probes", True),
        ("planned_steps", 0),
        ("planned_steps", 2.5),
        ("timeout", 0),
        ("timeout", "3"),
        ("timeout", float("nan")),
        ("study", 3),
        ("study", b"x"),
        ("study", ""),
        ("progress", 3),
    ],
)
def test_invalid_arguments_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        check_search_arguments(**GOOD | {name: value})
