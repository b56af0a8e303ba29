"""What the commands print on standard output, and the exit code that a probe's outcome means."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import typer

from autofit.measurement import Outcome, Trial
from autofit.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from autofit.report.report import Report

_OF_THE_WORKLOAD = (Outcome.LEAK, Outcome.NONFINITE, Outcome.UNSUPPORTED, Outcome.USER_ERROR)
"""Endings that another device or worker would not change."""


def show_report(report: Report, as_json: bool) -> None:
    """The report file's content, or text as wide as the terminal."""
    if as_json:
        print_result(json.dumps(report.to_dict(), indent=1))
    elif sys.stdout.isatty():
        print_result(report.to_text(width=min(shutil.get_terminal_size().columns, 120)))
    else:
        print_result(str(report))


def exit_code(outcome: Outcome) -> int:
    """Of a probe that ended like this."""
    if outcome is Outcome.OK:
        return 0
    if outcome.about_memory:
        return 1
    return 3 if outcome in _OF_THE_WORKLOAD else 4


def trial_line(trial: Trial) -> str:
    """What a plan needs and how fast it is, or how it ended, on one line."""
    measured = trial.measurement
    if not trial.ok:
        return f"{trial.plan}: {measured.outcome.value}: {measured.detail or 'no detail'}"
    return (
        f"{trial.plan}: {format_rate(trial.samples_per_second)}, "
        f"{format_seconds(measured.step_time_s)} an optimizer step, "
        f"held {format_bytes(measured.held_bytes)} "
        f"(peak allocated {format_bytes(measured.peak_allocated_bytes)}, "
        f"peak reserved {format_bytes(measured.peak_reserved_bytes)}, "
        f"non-torch {format_bytes(measured.non_torch_bytes)})"
    )


def trial_to_dict(trial: Trial) -> dict[str, Any]:
    """A probe's result as JSON has it."""
    return {
        "plan": trial.plan.to_dict(),
        "samples_per_second": trial.samples_per_second,
        **trial.measurement.to_dict(),
    }


def print_result(text: str) -> None:
    """On standard output, which nothing else is written to."""
    typer.echo(text.rstrip("\n"))
