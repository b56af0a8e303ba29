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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from types import FrameType
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer

from autofit.cli.console import Interrupted, print_result, say
from autofit.cli.options import AsJson, check_writable, paths
from autofit.devices.nvml import Nvml, all_devices
from autofit.errors import AutofitError, InvalidArgument
from autofit.interrupts import ended_like_interrupted, interrupts_deferred
from autofit.report.charts import Chart, Plot, scale_for
from autofit.report.page import page_of_charts
from autofit.report.report import write
from autofit.units import format_bytes, format_clock

_MOST_DRAWN = 2000
"""Points of a line; beyond it, the most of some neighbours is drawn."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

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
    gpus = all_devices()
    names = [f"GPU {at} ({gpu.name() or 'unknown'})" for at, gpu in enumerate(gpus)]
    timeline = Timeline(what, [path for path in out or () if path.suffix == ".csv"], names)
    came: list[int] = []
    status = _watched(command, timeline, gpus, every, came) if command else 0
    if not command:
        say(f"watching process {pid}; press Ctrl-C to stop")
        with suppress(KeyboardInterrupt), ended_like_interrupted():
            timeline.fill(watch(pid or 0, gpus), lambda: time.sleep(every))
    print_result(json.dumps(timeline.to_dict(), indent=1) if as_json else str(timeline))
    for path in out or ():
        if path.suffix == ".html":
            write(path, {".html": timeline.page}, "a timeline")
    if came:
        name = signal.Signals(came[0]).name
        raise Interrupted(f"the command was stopped by {name}", came[0])
    if status < 0:
        raise CommandFailed(f"the command was killed by {signal.Signals(-status).name}")
    if status:
        raise CommandFailed(f"the command ended with exit code {status}")


def _watched(
    command: Sequence[str],
    timeline: Timeline,
    gpus: Sequence[Nvml],
    every_s: float,
    came: list[int],
) -> int:
    """Run a command, watch it until it ends, and return its status; `came`: signals to end it."""
    began = time.monotonic()
    with _started(command, came) as child:

        def rest() -> None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(every_s)

        try:
            timeline.fill(watch(child.pid, gpus), rest)
        finally:
            status = child.wait()
            timeline.seconds = time.monotonic() - began
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
            if number == signal.SIGTERM:  # a terminal sends Ctrl-C to the command as well
                child.terminate()

        before = {number: signal.signal(number, pass_on) for number in _ENDING}
    try:
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDING = (signal.SIGTERM, signal.SIGINT)


class _Process(NamedTuple):
    """What /proc/PID/stat says, see proc_pid_stat(5)."""

    has_ended: bool
    parent: int
    started_ticks: int
    used_ticks: int
    resident_bytes: int


def _process(pid: int) -> _Process | None:
    """Return a process; None: there is none of that id."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()  # the name before may hold anything
    return _Process(
        has_ended=words[0] in "ZX",  # and its parent has not looked yet
        parent=int(words[1]),
        started_ticks=int(words[19]),
        used_ticks=int(words[11]) + int(words[12]),
        resident_bytes=int(words[21]) * _PAGE_BYTES,
    )


def _family(pid: int, started_ticks: int) -> dict[int, _Process]:
    """Return the process and its descendants by id; {}: it has ended."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    every = {pid: seen for pid in pids if (seen := _process(pid))}
    first = every.get(pid)
    if first is None or first.has_ended or first.started_ticks != started_ticks:
        return {}
    family = [pid]
    for parent in family:
        family += [child for child, seen in every.items() if seen.parent == parent]
    return {pid: every[pid] for pid in family}


def watch(pid: int, gpus: Sequence[Nvml]) -> Iterator[Row]:
    """Yield what a process and its descendants hold whenever it is asked, until the first ends.

    "resident_bytes" counts pages that processes share for each of them. "processor_percent" is of
    one core, since the look before. "gpu0_process_bytes" is None where NVML does not list the
    processes on that GPU; the bytes used and the share of busy time are of all processes. "GPU 0"
    is the first in the order of the PCI bus.

    Raises:
        InvalidArgument: there is no such process.
    """
    first = _process(pid)
    if first is None:
        raise InvalidArgument(f"there is no process {pid}: give the id of one that runs")
    began = last = time.monotonic()
    used: dict[int, int] = {}
    while running := _family(pid, first.started_ticks):
        now, before = time.monotonic(), used
        used = {pid: process.used_ticks for pid, process in running.items()}
        grown = sum(ticks - before.get(pid, 0) for pid, ticks in used.items())
        share = 100 * grown / _TICKS_PER_SECOND / max(now - last, 1e-3)
        row: dict[str, float | None] = {
            "seconds": now - began,
            "resident_bytes": sum(process.resident_bytes for process in running.values()),
            "processor_percent": share if before else None,
        }
        last = now
        for at, gpu in enumerate(gpus):
            listed = gpu.bytes_by_process() or {}
            own = [held for pid, held in listed.items() if pid in running]
            row[f"gpu{at}_process_bytes"] = sum(own) if own else None
            row[f"gpu{at}_used_bytes"] = gpu.used_bytes()
            row[f"gpu{at}_busy_percent"] = gpu.busy_percent()
        yield row


@dataclass
class Timeline:
    """What was seen; each row is written to tables at once.

    Attributes:
        what: was watched.
        tables: .csv files.
        gpus: names of the GPUs.
        seconds: the duration.
        began: date and time, in words.
        rows: in order.
    """

    what: str
    tables: Sequence[Path] = ()
    gpus: Sequence[str] = ()
    seconds: float = 0.0
    began: str = field(default_factory=lambda: f"{datetime.now():%Y-%m-%d %H:%M}")
    rows: list[Row] = field(default_factory=list)

    def fill(self, rows: Iterable[Row], rest: Callable[[], None]) -> None:
        """Add what is seen, with a rest between two looks; a kill of this process loses no row."""
        for row in rows:
            for path in self.tables:
                with path.open("a" if self.rows else "w", encoding="utf-8") as file:
                    if not self.rows:
                        print(*row, sep=",", file=file)
                    print(*map(_cell, row.values()), sep=",", file=file)
            self.rows.append(row)
            self.seconds = row["seconds"] or 0.0
            rest()

    @cached_property
    def totals(self) -> dict[str, float]:
        """The most of each column of bytes, and the mean of each of percents."""
        names = [name for name in (self.rows[0] if self.rows else ()) if name != "seconds"]
        known = {n: [v for row in self.rows if (v := row[n]) is not None] for n in names}
        return {
            name: fmean(values) if name.endswith("_percent") else max(values)
            for name, values in known.items()
            if values
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the most bytes and the mean percents."""
        about = {"what": self.what, "began": self.began, "seconds": self.seconds}
        return {**about, "gpus": list(self.gpus), **self.totals}

    def __str__(self) -> str:
        rows = [f"  {number:<12}{words}" for number, words in self.numbers()]
        return "\n".join([f"{self.what}: {format_clock(self.seconds)}", *rows])

    def numbers(self) -> Iterator[tuple[str, str]]:
        """Yield (number, what it is), those of the GPUs first."""
        words = {}
        for at in self._used_gpus():
            of_all = "" if f"gpu{at}_process_bytes" in self.totals else ", all processes"
            whose = "used" if of_all else "process"
            words[f"gpu{at}_{whose}_bytes"] = f"peak memory on GPU {at}{of_all}"
            words[f"gpu{at}_busy_percent"] = f"of the time with GPU {at} busy"
        words["resident_bytes"] = "peak host memory"
        words["processor_percent"] = "of one processor core on average"
        for name, what in words.items():
            if (total := self.totals.get(name)) is not None:
                is_percent = name.endswith("_percent")
                yield f"{total:.0f} %" if is_percent else format_bytes(total), what

    def page(self) -> str:
        """Return an HTML page with a chart of each GPU that was used, and one of the host."""
        charts = [
            self._chart(
                f"Memory of {self.gpus[at]}: the process, and all of them",
                {"held-line": f"gpu{at}_process_bytes", "all-line": f"gpu{at}_used_bytes"},
            )
            for at in self._used_gpus()
        ]
        charts.append(self._chart("Host memory", {"held-line": "resident_bytes"}))
        about = f"{self.began}, {format_clock(self.seconds)}"
        return page_of_charts(self.what, about, self.numbers(), charts, version("torch-autofit"))

    def _used_gpus(self) -> list[int]:
        """Return the GPUs on which the process was seen; all, where it was seen on none."""
        every = range(len(self.gpus))
        return [at for at in every if f"gpu{at}_process_bytes" in self.totals] or list(every)

    def _chart(self, title: str, columns: Mapping[str, str]) -> Chart:
        """Return the most bytes of columns over time, by the class of their line."""
        most = max((self.totals.get(column, 0.0) for column in columns.values()), default=0.0)
        unit, size = scale_for(most)
        plot = Plot(title, height=170, x_end=self.seconds, y_end=1.1 * most / size)
        plot.axes("seconds", f"memory, {unit}")
        together = -(-len(self.rows) // _MOST_DRAWN) or 1
        for kind, column in columns.items():
            held = [
                (r["seconds"] or 0.0, v / size) for r in self.rows if (v := r[column]) is not None
            ]
            parts = (held[at : at + together] for at in range(0, len(held), together))
            plot.line([(part[-1][0], max(value for _, value in part)) for part in parts], kind)
        return Chart(title, "", plot.drawn())


def _cell(value: float | None) -> str:
    """Return a cell of a table: bytes are whole, seconds and percent have decimals."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3f}"
