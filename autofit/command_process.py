"""A command as a process: what is on its standard output, how it is interrupted, its exit code."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import typer

from autofit.errors import AutofitError, is_users

_INTERRUPTED = 130
"""What a shell calls an end by Ctrl-C; typer turns a KeyboardInterrupt into it."""


@contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """A scheduler's SIGTERM is a Ctrl-C: what was measured by then is shown."""

    def interrupt(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what ends in "&"
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stdout_for_results_only() -> Iterator[None]:
    """What the user's own code prints goes to standard error, so that results can be piped."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def exit_codes() -> Iterator[None]:
    """Errors as messages and exit codes; a traceback only for the user's own code and for bugs."""
    try:
        yield
    except AutofitError as error:
        typer.echo(f"autofit: {error}", err=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            typer.echo("autofit: interrupted before anything that fits was measured", err=True)
        raise
    except Exception as error:
        _show_traceback(error)
        sys.exit(3 if is_users(error) else 4)


def _show_traceback(error: Exception) -> None:
    """Where the user's code raised it; the way from a probe to here would only bury that."""
    from autofit.probing.wire import WorkerTraceback

    if is_users(error) and isinstance(error.__cause__, WorkerTraceback):
        typer.echo(str(error.__cause__).strip(), err=True)
    else:
        traceback.print_exc()
