"""The command `monitor`: the memory that a process and those that it started hold over time.

Of the host it is resident memory (Linux's /proc), of each GPU memory and whether kernels ran
(NVML). Nothing is added to the process, and torch is not imported.
"""

from __future__ import annotations

import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from resource import getpagesize
from statistics import fmean
from textwrap import shorten
from typing import Annotated, Any, TypeAlias

import typer

from autofit.cli.console import print_result, say
from autofit.cli.options import AsJson, check_out, paths
from autofit.devices.nvml import Nvml, all_devices
from autofit.errors import AutofitError, InvalidArgument
from autofit.interrupts import ended_like_interrupted, interrupts_deferred
from autofit.units import format_bytes, format_clock

Row: TypeAlias = dict[str, float | None]
"""What was seen at a moment, by column: "seconds" since the watch began, bytes, percent."""


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
        typer.Option(metavar="FILES", help="write each row to .csv at once", callback=paths),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Watch the memory of a training, on GPUs and host (exit code 3: the command failed).

    What the command prints goes to standard error, the summary to standard output.
    """
    if bool(command) == (pid is not None):
        raise InvalidArgument("give either a command after -- or the --pid of a running process")
    if math.isnan(every):  # older versions of click take it for within any range
        raise InvalidArgument("--every must be a number of seconds, got nan")
    for path in out or ():
        check_out(path, (".csv",), "a timeline")
    what = f"process {pid}" if command is None else shorten(shlex.join(command), 80)
    gpus, began, status = all_devices(), time.monotonic(), 0
    names = [f"GPU {at} ({gpu.name()})" for at, gpu in enumerate(gpus)]
    timeline = Timeline(what, names, out or ())
    if command:
        status = _run(command, timeline, gpus, every)
    else:
        say(f"watching process {pid}; press Ctrl-C to stop")
        with suppress(KeyboardInterrupt), ended_like_interrupted():
            timeline.fill(watch(pid or 0, gpus), lambda: time.sleep(every))
    timeline.seconds = time.monotonic() - began
    print_result(json.dumps(timeline.to_dict(), indent=1) if as_json else str(timeline))
    if status:
        failed = AutofitError(str(subprocess.CalledProcessError(status, what)))
        failed.exit_code = 3
        raise failed


def _run(command: Sequence[str], timeline: Timeline, gpus: Sequence[Nvml], every_s: float) -> int:
    """Run and watch a command, which signals reach as if it ran alone; return its status."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with interrupts_deferred():  # else a signal could end this process alone
            child = subprocess.Popen(command, stdout=sys.stderr)
            signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command, too
    except OSError as error:
        raise InvalidArgument(f"cannot run {command[0]}: {error.strerror}") from None

    def rest() -> None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(every_s)

    try:
        timeline.fill(watch(child.pid, gpus), rest)
    finally:
        status = child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return status


def _family(pid: int) -> dict[int, int]:
    """Return the resident bytes of a process and its descendants by id; {}: it has ended."""
    parents: dict[int, int] = {}
    resident: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            # Fields of proc_pid_stat(5) after the name, which may hold anything
            state, parent, *others = path.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":  # else it has ended, and its parent has not looked yet
                parents[int(path.parent.name)] = int(parent)
                resident[int(path.parent.name)] = int(others[19]) * getpagesize()
    family = [pid] if pid in parents else []
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
    return {each: resident[each] for each in family}


def watch(pid: int, gpus: Sequence[Nvml]) -> Iterator[Row]:
    """Yield what a process and its descendants hold whenever it is asked, until the first ends.

    "resident_bytes" counts pages that processes share for each of them. "gpu0_process_bytes" is
    None where NVML does not list the processes on that GPU; the bytes used and the share of busy
    time are of all processes. "GPU 0" is the first in the order of the PCI bus.

    Raises:
        InvalidArgument: there is no such process.
    """
    began, running = time.monotonic(), _family(pid)
    if not running:
        raise InvalidArgument(f"there is no process {pid}: give the id of one that runs")
    while running:
        row: Row = {"seconds": time.monotonic() - began, "resident_bytes": sum(running.values())}
        for at, gpu in enumerate(gpus):
            listed = gpu.bytes_by_process() or {}
            own = [listed[pid] for pid in running if pid in listed]
            row[f"gpu{at}_process_bytes"] = sum(own) if own else None
            row[f"gpu{at}_used_bytes"] = gpu.used_bytes()
            row[f"gpu{at}_busy_percent"] = gpu.busy_percent()
        yield row
        running = _family(pid)


@dataclass
class Timeline:
    """What was seen.

    Attributes:
        what: was watched.
        gpus: their names.
        out: files, to which each row is written at once, so that a kill loses none.
        seconds: the duration.
        rows: in order.
    """

    what: str
    gpus: Sequence[str] = ()
    out: Sequence[Path] = ()
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def fill(self, rows: Iterable[Row], rest: Callable[[], None]) -> None:
        """Add what is seen, with a rest between two looks."""
        for row in rows:
            for path in self.out:
                with path.open("a" if self.rows else "w", encoding="utf-8") as file:
                    if not self.rows:
                        print(*row, sep=",", file=file)
                    print(*("" if v is None else v for v in row.values()), sep=",", file=file)
            self.rows.append(row)
            rest()

    def totals(self) -> dict[str, float]:
        """Return the most of each column of bytes, and the mean of each of percents."""
        names = [name for name in (self.rows[0] if self.rows else ()) if name != "seconds"]
        seen = {name: [v for row in self.rows if (v := row[name]) is not None] for name in names}
        return {
            name: fmean(values) if name.endswith("_percent") else max(values)
            for name, values in seen.items()
            if values
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the most bytes and the mean percents."""
        return {"what": self.what, "gpus": [*self.gpus], "seconds": self.seconds} | self.totals()

    def __str__(self) -> str:
        words = {"resident_bytes": "peak host memory"}
        for at, name in enumerate(self.gpus):
            words[f"gpu{at}_process_bytes"] = f"peak memory on {name}"
            words[f"gpu{at}_used_bytes"] = f"peak memory of all processes on {name}"
            words[f"gpu{at}_busy_percent"] = f"of the time with a kernel on {name}"
        lines = [f"{self.what}: {format_clock(self.seconds)}"]
        for name, total in self.totals().items():
            figure = f"{total:.0f} %" if name.endswith("_percent") else format_bytes(total)
            lines.append(f"  {figure:<12}{words[name]}")
        return "\n".join(lines)
