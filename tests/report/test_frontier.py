"""The frontier holds what is worth choosing between, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Plan
from autofit.report.frontier import frontier
from autofit.report.record import Record


def numbers(trials: tuple[Trial, ...]) -> list[int]:
    return [trial.number for trial in trials]


def test_the_fastest_comes_first_and_each_further_one_holds_less(record: Record) -> None:
    assert numbers(frontier(record.trials)) == [6, 5]


def test_a_confirmation_replaces_the_probe_of_the_same_plan(record: Record) -> None:
    before_confirming = record.trials[:-1]
    assert numbers(frontier(before_confirming)) == [3, 5]


def test_of_two_as_lean_only_the_faster_stays() -> None:
    def ran(number: int, seconds: float, held: int) -> Trial:
        measurement = Measurement(Outcome.OK, step_times_s=[seconds], peak_reserved_bytes=held)
        return Trial(number, Role.SEARCH, Plan(number + 1), measurement)

    fast, slow, lean = ran(7, 0.1, 500), ran(7, 0.5, 500), ran(0, 0.9, 100)
    slow = replace(slow, number=8, plan=Plan(9))
    assert numbers(frontier([slow, lean, fast])) == [7, 0]


def test_what_did_not_run_is_never_on_it(record: Record) -> None:
    failures = [trial for trial in record.trials if not trial.ok]
    assert len(failures) == 3
    assert frontier(failures) == ()


def test_a_vetoed_repetition_does_not_replace_the_confirmation(record: Record) -> None:
    repeated = replace(record.trials[3], number=7, role=Role.VETOED)
    assert numbers(frontier([*record.trials, repeated])) == [6, 5]
