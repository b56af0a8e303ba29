"""The command `monitor`: a running training's memory and utilisation over time."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import IO, TYPE_CHECKING, Annotated

import typer

from autofit.cli.console import Interrupted, print_result, say
from autofit.cli.options import AsJson, check_writable, paths
from autofit.errors import AutofitError, InvalidArgument
from autofit.interrupts import ended_like_interrupted, interrupts_deferred
from autofit.units import format_clock

if TYPE_CHECKING:
    from autofit.checks.monitor import Sample, Timeline, Watch

_FORMS = (".csv", ".html")


def monitor(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="run this and watch it until it ends"),
    ] = None,
    pid: Annotated[
        int | None, typer.Option(min=1, help="watch this process, until it ends or Ctrl-C")
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.05, max=86400, help="seconds between two samples")
    ] = 1.0,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILES",
            help="write the timeline, by commas: .csv, row by row, or .html, at the end",
            callback=paths,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Watch what a training holds and uses, on GPUs and host (exit code 3: the command failed).

    What the command prints goes to standard error, the summary to standard output.
    """
    if bool(command) == (pid is not None):
        raise InvalidArgument("give either a command after -- or the --pid of a running process")
    if math.isnan(every):  # older versions of click take it for within any range
        raise InvalidArgument("--every must be a number of seconds, got nan")
    for path in out or ():
        check_writable(path, _FORMS, "a timeline")
    what = f"process {pid}" if command is None else shorten(shlex.join(command), 80)
    files = _Files(out or ())
    if command is None:
        timeline, ended = _watch_other(pid or 0, what, every, files), None
    else:
        timeline, ended = _watch_own(command, what, every, files)
    try:
        files.end(timeline)
    finally:
        print_result(json.dumps(timeline.to_dict(), indent=1) if as_json else str(timeline))
    if ended is not None:
        ended.check()


@dataclass
class _Ended:
    """How a command ended, and the first signal that was to end it before."""

    status: int = 0
    came: int | None = None

    def check(self) -> None:
        """Raise what gives the exit code, unless the command did not fail."""
        if self.came is not None:
            name = signal.Signals(self.came).name
            raise Interrupted(f"the command was stopped by {name}", self.came)
        if self.status < 0:
            raise CommandFailed(f"the command was killed by {signal.Signals(-self.status).name}")
        if self.status:
            raise CommandFailed(f"the command ended with exit code {self.status}")


class CommandFailed(AutofitError):
    """The command that was watched failed."""

    exit_code = 3


def _watch_other(pid: int, what: str, every_s: float, files: _Files) -> Timeline:
    """Watch a process until it ends, or Ctrl-C or SIGTERM comes."""
    from autofit.checks.monitor import Watch

    watch = Watch(pid)
    timeline = _timeline(what, watch)
    say(f"watching process {pid}; press Ctrl-C to stop")
    with suppress(KeyboardInterrupt), ended_like_interrupted():
        _fill(timeline, watch, files, lambda: time.sleep(every_s))
    timeline.end(watch.seconds)
    return timeline


def _watch_own(
    command: Sequence[str], what: str, every_s: float, files: _Files
) -> tuple[Timeline, _Ended]:
    """Run a command and watch it until it ends, also where a signal asks it to."""
    from autofit.checks.monitor import Watch

    began = time.monotonic()  # before the command, whose seconds are told
    with _started(command) as (child, ended):
        watch = Watch(child.pid, began)
        timeline = _timeline(what, watch)

        def rest() -> None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(every_s)

        try:
            _fill(timeline, watch, files, rest)
        finally:
            ended.status = child.wait()
            timeline.end(watch.seconds)
    return timeline, ended


def _fill(timeline: Timeline, watch: Watch, files: _Files, rest: Callable[[], None]) -> None:
    while (sample := watch.sample()) is not None:
        timeline.add(sample)
        files.add(sample)
        rest()


def _timeline(what: str, watch: Watch) -> Timeline:
    from autofit.checks.monitor import Timeline

    return Timeline(what, watch.gpus, f"{datetime.now():%Y-%m-%d %H:%M}")


@contextmanager
def _started(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], _Ended]]:
    """Start a command that signals reach as if it had been started alone.

    Raises:
        InvalidArgument: it cannot be started.
    """
    ended = _Ended()
    with interrupts_deferred():  # else a signal could end this process alone
        try:
            child = subprocess.Popen(command, stdout=sys.stderr)
        except OSError as error:
            raise InvalidArgument(f"cannot run {command[0]}: {error.strerror}") from None

        def pass_on(number: int, frame: FrameType | None) -> None:
            ended.came = ended.came or number
            if number != signal.SIGINT or not _terminal_reaches_us():
                child.send_signal(number)

        ours = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
            ours.remove(signal.SIGINT)
        before = {number: signal.signal(number, pass_on) for number in ours}
    try:
        yield child, ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminal_reaches_us() -> bool:
    """Return whether Ctrl-C in a terminal comes to this process, and so to the command as well."""
    with suppress(OSError), open("/dev/tty") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


class _Files:
    """The files of a timeline; what cannot be written does not end the watch.

    Args:
        paths: .csv, to which each sample is written at once, and .html.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[Path, IO[str] | None] = {}
        self._lost: list[str] = []

    def add(self, sample: Sample) -> None:
        """Write a row: nothing of it is lost where this process is killed."""
        row = [f"{sample.seconds:.3f}", *map(_cell, sample.values.values())]
        for path in self._paths:
            try:
                if path.suffix == ".csv" and path not in self._open:
                    self._open[path] = path.open("w", buffering=1, encoding="utf-8")
                    print("seconds", *sample.values, sep=",", file=self._open[path])
                if (file := self._open.get(path)) is not None:
                    print(*row, sep=",", file=file)
            except OSError as error:
                self._open[path] = None
                self._lost.append(f"cannot write {path}: {error.strerror}")

    def end(self, timeline: Timeline) -> None:
        """Close the tables and write the pages.

        Raises:
            InvalidArgument: a file could not be written.
        """
        from autofit.report.report import write

        for file in self._open.values():
            if file is not None:
                file.close()
        for path in self._paths:
            if path.suffix == ".html":
                try:
                    write(path, {".html": lambda: _page(timeline)}, "a timeline")
                except InvalidArgument as error:
                    self._lost.append(str(error))
        if self._lost:
            raise InvalidArgument("; ".join(self._lost))


def _cell(value: float | None) -> str:
    """Return a cell of a table: bytes are whole, percent have one decimal."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _page(timeline: Timeline) -> str:
    from autofit.report.page import page_of_charts

    return page_of_charts(
        timeline.what,
        f"{timeline.began}, {format_clock(timeline.seconds)}",
        timeline.numbers(),
        list(timeline.charts()),
        version("torch-autofit"),
    )
