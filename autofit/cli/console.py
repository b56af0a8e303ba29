"""The commands as processes: standard output, signals and exit codes."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from autofit.errors import AutofitError, is_users
from autofit.measurement import Outcome, Trial
from autofit.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from autofit.report.report import Report

_OF_THE_WORKLOAD = (Outcome.LEAK, Outcome.NONFINITE, Outcome.UNSUPPORTED, Outcome.USER_ERROR)
"""Outcomes that another device or worker would not change."""


def show_report(report: Report, as_json: bool) -> None:
    """Print the report as JSON, or as text as wide as the terminal."""
    if as_json:
        print_result(json.dumps(report.to_dict(), indent=1))
    elif sys.stdout.isatty():
        print_result(report.to_text(width=min(shutil.get_terminal_size().columns, 120)))
    else:
        print_result(str(report))


def exit_code(outcome: Outcome) -> int:
    """Return the exit code for a probe with this outcome."""
    if outcome is Outcome.OK:
        return 0
    if outcome.about_memory:
        return 1
    return 3 if outcome in _OF_THE_WORKLOAD else 4


def trial_line(trial: Trial) -> str:
    """Format a trial on one line: memory and speed, or its outcome."""
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
    """Return the JSON form of a probe's result."""
    return {
        "plan": trial.plan.to_dict(),
        "samples_per_second": trial.samples_per_second,
        **trial.measurement.to_dict(),
    }


def print_result(text: str) -> None:
    """Print to standard output, which carries results only."""
    typer.echo(text.rstrip("\n"))


_INTERRUPTED = 130
"""The exit code of a process ended by Ctrl-C; typer turns a KeyboardInterrupt into it."""


@contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that a scheduler's stop still yields a report."""

    def interrupt(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stdout_for_results_only() -> Iterator[None]:
    """Send what the user's own code prints to standard error, so that results can be piped."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors into messages and exit codes; show tracebacks of user code and bugs only."""
    try:
        yield
    except AutofitError as error:
        typer.echo(f"autofit: {error}", err=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if is_users(end):
            _show_traceback(end)
            sys.exit(3)
        if end.code == _INTERRUPTED:
            typer.echo("autofit: interrupted before anything that fits was measured", err=True)
        raise
    except Exception as error:
        _show_traceback(error)
        sys.exit(3 if is_users(error) else 4)


def _show_traceback(error: BaseException) -> None:
    """Show the traceback of the user's code without the frames between the probe and here."""
    from autofit.probing.messages import WorkerTraceback

    if is_users(error) and isinstance(error.__cause__, WorkerTraceback):
        typer.echo(str(error.__cause__).strip(), err=True)
    else:
        traceback.print_exc()
