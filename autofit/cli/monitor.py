"""The command `monitor`: what a process and those that it started hold and use over time.

Of the host it is resident memory and processor time (Linux's /proc), of each GPU memory and whether
kernels ran (NVML). Nothing is added to the process, and torch is not imported.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import IO, Annotated, Any, TypeAlias

import typer

from autofit.cli.console import Interrupted, print_result, say
from autofit.cli.options import AsJson, check_writable, paths
from autofit.devices.nvml import all_devices
from autofit.errors import AutofitError, InvalidArgument
from autofit.interrupts import ended_like_interrupted, interrupts_deferred
from autofit.report.charts import Chart, Plot, legend, scale_for
from autofit.report.page import page_of_charts
from autofit.report.report import write
from autofit.units import format_bytes, format_clock

_MOST_ROWS = 2000
"""Kept for the page, twice this at times; beyond it neighbours become one."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LINES = {"held-line": "the process", "all-line": "all processes"}

Row: TypeAlias = Mapping[str, float | None]
"""What was seen at a moment: its "seconds" since the watch began, and by column bytes where the
name ends in "_bytes", percent where in "_percent"; None: not told."""


class CommandFailed(AutofitError):
    """The command that was watched failed."""

    exit_code = 3


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
        check_writable(path, (".csv", ".html"), "a timeline")
    what = f"process {pid}" if command is None else shorten(shlex.join(command), 80)
    timeline = Timeline(what, [path for path in out or () if path.suffix == ".csv"])
    status, came = 0, list[int]()
    if command is None:
        watch = Watch(pid or 0)
        say(f"watching process {pid}; press Ctrl-C to stop")
        with suppress(KeyboardInterrupt), ended_like_interrupted():
            timeline.fill(watch, lambda: time.sleep(every))
    else:
        status = _watch_own(command, timeline, every, came)
    try:
        timeline.end([path for path in out or () if path.suffix == ".html"])
    finally:
        print_result(json.dumps(timeline.to_dict(), indent=1) if as_json else str(timeline))
    if came:
        name = signal.Signals(came[0]).name
        raise Interrupted(f"the command was stopped by {name}", came[0])
    if status < 0:
        raise CommandFailed(f"the command was killed by {signal.Signals(-status).name}")
    if status:
        raise CommandFailed(f"the command ended with exit code {status}")


def _watch_own(command: Sequence[str], timeline: Timeline, every_s: float, came: list[int]) -> int:
    """Run a command, watch it until it ends, and return its status; `came`: signals to end it."""
    began = time.monotonic()  # before the command, whose seconds are told
    with _started(command, came) as child:

        def rest() -> None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(every_s)

        watch = Watch(child.pid, began)
        try:
            timeline.fill(watch, rest)
        finally:
            status = child.wait()
            timeline.seconds = max(timeline.seconds, time.monotonic() - began)
    return status


@contextmanager
def _started(command: Sequence[str], came: list[int]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that signals reach as if it had been started alone.

    Raises:
        InvalidArgument: it cannot be started.
    """
    with interrupts_deferred():  # else a signal could end this process alone
        try:
            child = subprocess.Popen(command, stdout=sys.stderr)
        except OSError as error:
            raise InvalidArgument(f"cannot run {command[0]}: {error.strerror}") from None

        def pass_on(number: int, frame: FrameType | None) -> None:
            came.append(number)
            if number != signal.SIGINT or not _terminal_reaches_us():
                child.send_signal(number)

        ours = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
            ours.remove(signal.SIGINT)
        before = {number: signal.signal(number, pass_on) for number in ours}
    try:
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminal_reaches_us() -> bool:
    """Return whether Ctrl-C in a terminal comes to this process, and so to the command as well."""
    with suppress(OSError), open("/dev/tty") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


@dataclass(frozen=True)
class _Process:
    """What /proc/PID/stat says, see proc_pid_stat(5)."""

    has_ended: bool
    parent: int
    started_ticks: int
    used_ticks: int
    resident_bytes: int


def _process(folder: Path) -> _Process | None:
    """Return a process; None: there is none of that id."""
    try:
        words = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return _Process(
        has_ended=words[0] in "ZX",  # and its parent has not looked yet
        parent=int(words[1]),
        started_ticks=int(words[19]),
        used_ticks=int(words[11]) + int(words[12]),
        resident_bytes=int(words[21]) * _PAGE_BYTES,
    )


class Watch:
    """Looks at a process and at those that it started.

    Args:
        pid: of the process.
        began: the moment of `time.monotonic` from which seconds count; None: now.

    Attributes:
        gpus: names of the GPUs, "GPU 0" being the first in the order of the PCI bus.

    Raises:
        InvalidArgument: there is no such process.
    """

    def __init__(self, pid: int, began: float | None = None) -> None:
        found = _process(Path(f"/proc/{pid}"))
        if found is None:
            raise InvalidArgument(f"there is no process {pid}: give the id of one that runs")
        self._pid, self._started_ticks = pid, found.started_ticks
        self._gpus = all_devices()
        self.gpus = [f"GPU {at} ({g.name() or 'unknown'})" for at, g in enumerate(self._gpus)]
        self._began = self._last = time.monotonic() if began is None else began
        self._used_ticks: dict[int, int] = {}

    def look(self) -> Row | None:
        """Return what is seen now; None: the process has ended.

        "resident_bytes" counts pages that processes share for each of them. "processor_percent" is
        of one core, since the look before. "gpu0_process_bytes" is None where NVML does not list
        the processes on that GPU; the bytes used and the share of busy time are of all processes.
        """
        running = self._running()
        if running is None:
            return None
        now = time.monotonic()
        used = {pid: process.used_ticks for pid, process in running.items()}
        grown = sum(ticks - self._used_ticks.get(pid, 0) for pid, ticks in used.items())
        share = 100 * grown / _TICKS_PER_SECOND / max(now - self._last, 1e-3)
        row: dict[str, float | None] = {
            "seconds": now - self._began,
            "resident_bytes": sum(process.resident_bytes for process in running.values()),
            "processor_percent": share if self._used_ticks else None,
        }
        self._last, self._used_ticks = now, used
        for at, gpu in enumerate(self._gpus):
            listed = gpu.bytes_by_process() or {}
            own = [held for pid, held in listed.items() if pid in running]
            row[f"gpu{at}_process_bytes"] = sum(own) if own else None
            row[f"gpu{at}_used_bytes"] = gpu.used_bytes()
            row[f"gpu{at}_busy_percent"] = gpu.busy_percent()
        return row

    def _running(self) -> dict[int, _Process] | None:
        """Return the process and its descendants by id; None: it has ended."""
        folders = (path for path in Path("/proc").iterdir() if path.name.isdigit())
        every = {int(path.name): seen for path in folders if (seen := _process(path))}
        first = every.get(self._pid)
        if first is None or first.has_ended or first.started_ticks != self._started_ticks:
            return None
        children: dict[int, list[int]] = {}
        for pid, process in every.items():
            children.setdefault(process.parent, []).append(pid)
        tree, ahead = {self._pid: first}, [self._pid]
        while ahead:
            new = children.get(ahead.pop(), [])
            tree |= {pid: every[pid] for pid in new}
            ahead += new
        return tree


@dataclass
class Timeline:
    """Rows of any duration in bounded memory, each written to tables at once.

    Neighbours become one where there are many: of bytes the most is kept, of percents the mean.

    Attributes:
        what: was watched.
        tables: .csv files.
        gpus: names of the GPUs.
        seconds: the duration.
        began: date and time, in words.
    """

    what: str
    tables: Sequence[Path] = ()
    gpus: Sequence[str] = ()
    seconds: float = 0.0
    began: str = field(default_factory=lambda: f"{datetime.now():%Y-%m-%d %H:%M}")
    _rows: list[Row] = field(default_factory=list)
    _latest: list[Row] = field(default_factory=list)
    _joined: int = 1
    _open: dict[Path, IO[str]] = field(default_factory=dict)
    _lost: dict[Path, str] = field(default_factory=dict)

    def fill(self, watch: Watch, rest: Callable[[], None]) -> None:
        """Add what is seen, with a rest between two looks, until the process ends."""
        self.gpus = watch.gpus
        while (row := watch.look()) is not None:
            self.add(row)
            rest()

    def add(self, row: Row) -> None:
        """Add the next row; nothing of it is lost where this process is killed."""
        for path in self.tables:
            self._write(path, row)
        self.seconds = row["seconds"] or 0.0
        self._latest.append(row)
        if len(self._latest) == self._joined:
            self._rows.append(_merged(self._latest))
            self._latest = []
        if len(self._rows) == 2 * _MOST_ROWS:
            pairs = zip(self._rows[::2], self._rows[1::2], strict=True)
            self._rows = [_merged(pair) for pair in pairs]
            self._joined *= 2

    def _write(self, path: Path, row: Row) -> None:
        """Write a row to a table; a full disk does not end the watch."""
        try:
            if path not in self._open:
                self._open[path] = path.open("w", buffering=1, encoding="utf-8")
                print(*row, sep=",", file=self._open[path])
            print(*map(_cell, row.values()), sep=",", file=self._open[path])
        except OSError as error:
            self._lost[path] = f"cannot write {path}: {error.strerror}"

    def end(self, pages: Sequence[Path]) -> None:
        """Close the tables and write the pages.

        Raises:
            InvalidArgument: a file could not be written.
        """
        for file in self._open.values():
            with suppress(OSError):  # what a full disk did not take is told already
                file.close()
        for path in pages:
            write(path, {".html": self.page}, "a timeline")
        if self._lost:
            raise InvalidArgument("; ".join(self._lost.values()))

    def page(self) -> str:
        """Return an HTML page with a chart of each GPU that was used, and one of the host."""
        about, numbers = f"{self.began}, {format_clock(self.seconds)}", self.numbers()
        return page_of_charts(
            self.what, about, numbers, [*self._charts()], version("torch-autofit")
        )

    @property
    def rows(self) -> list[Row]:
        """The rows, in order."""
        return [*self._rows, *([_merged(self._latest)] if self._latest else [])]

    def totals(self) -> dict[str, float]:
        """Return the most of each column of bytes, and the mean of each of percents."""
        joined = _merged(self.rows) if self.rows else {}
        return {n: value for n, value in joined.items() if value is not None and n != "seconds"}

    def numbers(self) -> Iterator[tuple[str, str]]:
        """Yield (number, what it is), those of the GPUs first."""
        totals = self.totals()
        for at in self._used_gpus(totals):
            own, used = (totals.get(f"gpu{at}_{whose}_bytes") for whose in ("process", "used"))
            if own is not None:
                yield format_bytes(own), f"peak memory on GPU {at}"
            elif used is not None:
                yield format_bytes(used), f"peak memory on GPU {at}, all processes"
            if (busy := totals.get(f"gpu{at}_busy_percent")) is not None:
                yield f"{busy:.0f} %", f"of the time with GPU {at} busy"
        if "resident_bytes" in totals:
            yield format_bytes(totals["resident_bytes"]), "peak host memory"
        if "processor_percent" in totals:
            yield f"{totals['processor_percent']:.0f} %", "of one processor core on average"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the most bytes and the mean percents."""
        about = {"what": self.what, "began": self.began, "seconds": self.seconds}
        return {**about, "gpus": list(self.gpus), **self.totals()}

    def __str__(self) -> str:
        rows = [f"  {number:<12}{words}" for number, words in self.numbers()]
        return "\n".join([f"{self.what}: {format_clock(self.seconds)}", *rows])

    def _used_gpus(self, totals: Mapping[str, float]) -> list[int]:
        """Return the GPUs on which the process was seen; all, where it was seen on none."""
        every = range(len(self.gpus))
        return [at for at in every if f"gpu{at}_process_bytes" in totals] or list(every)

    def _charts(self) -> Iterator[Chart]:
        for at in self._used_gpus(self.totals()):
            held = {"held-line": f"gpu{at}_process_bytes", "all-line": f"gpu{at}_used_bytes"}
            yield self._chart(f"gpu{at}", self.gpus[at], held, f"gpu{at}_busy_percent", "busy, %")
        held = {"held-line": "resident_bytes"}
        yield self._chart("host", "Host", held, "processor_percent", "of a processor core, %")

    def _chart(
        self, name: str, heading: str, held: Mapping[str, str], use: str, unit: str
    ) -> Chart:
        totals = self.totals()
        known = {kind: column for kind, column in held.items() if column in totals}
        in_bytes, size = scale_for(max((totals[column] for column in known.values()), default=1))
        y_title = f"memory, {in_bytes}"
        shown = self._drawn(name, f"Memory of {heading}", y_title, known, size)
        if len(known) > 1:
            shown += legend(_LINES)
        if use in totals:
            shown += self._drawn(f"{name}-use", f"Use of {heading}", unit, {"use-line": use}, 1)
        return Chart(heading, "", shown)

    def _drawn(
        self, name: str, title: str, y_title: str, columns: Mapping[str, str], size: int
    ) -> str:
        """Return columns over time as HTML, by the class of their colour."""
        courses = {
            kind: [
                (row["seconds"] or 0.0, value / size)
                for row in self.rows
                if (value := row.get(column)) is not None
            ]
            for kind, column in columns.items()
        }
        most = max((value for course in courses.values() for _, value in course), default=1.0)
        about = f"From 0 to {self.seconds:.0f} seconds; the most is {most:.4g} ({y_title})."
        plot = Plot(name, title, about, height=170, x_end=self.seconds, y_end=1.1 * most)
        plot.axes("seconds", y_title)
        for kind, course in courses.items():
            plot.line(course, kind)
        return plot.drawn()


def _cell(value: float | None) -> str:
    """Return a cell of a table: bytes are whole, seconds and percent have decimals."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _merged(rows: Sequence[Row]) -> Row:
    """Return one row for all of these, at the time of the last."""
    merged: dict[str, float | None] = {}
    for name in rows[-1]:
        known = [value for row in rows if (value := row[name]) is not None]
        is_most = name == "seconds" or name.endswith("_bytes")
        merged[name] = (max(known) if is_most else sum(known) / len(known)) if known else None
    return merged
