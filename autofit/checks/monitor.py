"""What a process and those that it started hold and use over time, seen from outside.

Of the host it is resident memory and processor time (Linux's /proc), of each GPU memory and whether
kernels ran (NVML). Nothing is added to the process, and torch is not imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.devices.nvml import Nvml, all_devices
from autofit.errors import InvalidArgument
from autofit.report.charts import Chart, Plot, legend, scale_for
from autofit.units import format_bytes, format_clock

_MOST_SAMPLES = 2000
"""Kept for the page, twice this at times; beyond it neighbours become one."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """What was seen at a moment.

    Attributes:
        seconds: since the watch began.
        values: by column: bytes where the name ends in "_bytes", percent where in "_percent"; None:
            not told.
    """

    seconds: float
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class _Process:
    """What /proc/PID/stat says, see proc_pid_stat(5)."""

    has_ended: bool
    parent: int
    started_ticks: int
    used_ticks: int
    resident_bytes: int


class Watch:
    """Samples of a process and of those that it started.

    Args:
        pid: of the process.
        began: the moment of `time.monotonic` from which seconds count; None: now.

    Raises:
        InvalidArgument: there is no such process.
    """

    def __init__(self, pid: int, began: float | None = None) -> None:
        found = _process(Path(f"/proc/{pid}"))
        if found is None:
            raise InvalidArgument(f"there is no process {pid}: give the id of one that runs")
        self._pid, self._started_ticks = pid, found.started_ticks
        self._gpus = all_devices()
        self._began = self._last = time.monotonic() if began is None else began
        self._used_ticks: dict[int, int] = {}

    @property
    def seconds(self) -> float:
        """The time since the watch began."""
        return time.monotonic() - self._began

    @property
    def gpus(self) -> list[str]:
        """Names of the GPUs, "GPU 0" being the first in the order of the PCI bus."""
        return [f"GPU {at} ({gpu.name() or 'unknown'})" for at, gpu in enumerate(self._gpus)]

    def sample(self) -> Sample | None:
        """Return what is seen now; None: the process has ended.

        "resident_bytes" counts pages that processes share for each of them. "processor_percent" is
        of one core, since the sample before. "gpu0_process_bytes" is None where NVML does not list
        the processes on that GPU; the bytes used and the share of busy time are of all processes.
        """
        running = self._running()
        if running is None:
            return None
        now = time.monotonic()
        used = {pid: process.used_ticks for pid, process in running.items()}
        grown = sum(ticks - self._used_ticks.get(pid, 0) for pid, ticks in used.items())
        share = 100 * grown / _TICKS_PER_SECOND / max(now - self._last, 1e-3)
        values: dict[str, float | None] = {
            "resident_bytes": sum(process.resident_bytes for process in running.values()),
            "processor_percent": share if self._used_ticks else None,
        }
        self._last, self._used_ticks = now, used
        for at, gpu in enumerate(self._gpus):
            values |= {f"gpu{at}_{name}": value for name, value in _of_gpu(gpu, running).items()}
        return Sample(now - self._began, values)

    def _running(self) -> dict[int, _Process] | None:
        """Return the process and its descendants by id; None: it has ended."""
        folders = (path for path in Path("/proc").iterdir() if path.name.isdigit())
        every = {int(path.name): seen for path in folders if (seen := _process(path))}
        first = every.get(self._pid)
        is_another = first is None or first.started_ticks != self._started_ticks  # of the same id
        if first is None or first.has_ended or is_another:
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


def _of_gpu(gpu: Nvml, running: Mapping[int, _Process]) -> dict[str, float | None]:
    listed = gpu.bytes_by_process() or {}
    own = [held for pid, held in listed.items() if pid in running]
    return {
        "process_bytes": sum(own) if own else None,
        "used_bytes": gpu.used_bytes(),
        "busy_percent": gpu.busy_percent(),
    }


@dataclass
class Timeline:
    """Samples of any duration in bounded memory.

    Neighbours become one where there are many: of bytes the most is kept, of percents the mean.

    Attributes:
        what: was watched.
        gpus: names of the GPUs.
        began: date and time, in words.
        seconds: the duration.
    """

    what: str
    gpus: Sequence[str]
    began: str
    seconds: float = 0.0
    _samples: list[Sample] = field(default_factory=list)
    _latest: list[Sample] = field(default_factory=list)
    _joined: int = 1

    def end(self, seconds: float) -> None:
        """Note how long the watch went on after the last sample."""
        self.seconds = max(self.seconds, seconds)

    def add(self, sample: Sample) -> None:
        """Add the next sample."""
        self.seconds = sample.seconds
        self._latest.append(sample)
        if len(self._latest) == self._joined:
            self._samples.append(_merged(self._latest))
            self._latest = []
        if len(self._samples) == 2 * _MOST_SAMPLES:
            pairs = zip(self._samples[::2], self._samples[1::2], strict=True)
            self._samples = [_merged(pair) for pair in pairs]
            self._joined *= 2

    @property
    def samples(self) -> list[Sample]:
        """The samples, in order."""
        return [*self._samples, *([_merged(self._latest)] if self._latest else [])]

    def totals(self) -> dict[str, float]:
        """Return the most of each column of bytes, and the mean of each of percents."""
        if not self.samples:
            return {}
        joined = _merged(self.samples).values
        return {name: value for name, value in joined.items() if value is not None}

    def numbers(self) -> Iterator[tuple[str, str]]:
        """Yield (number, what it is), those of the GPUs first."""
        totals = self.totals()
        for at in self._used_gpus():
            gpu = f"gpu{at}"
            if f"{gpu}_process_bytes" in totals:
                most = format_bytes(totals[f"{gpu}_process_bytes"])
                yield most, f"peak memory on GPU {at}"
            elif f"{gpu}_used_bytes" in totals:
                most = format_bytes(totals[f"{gpu}_used_bytes"])
                yield most, f"peak memory on GPU {at}, all processes"
            if f"{gpu}_busy_percent" in totals:
                yield f"{totals[f'{gpu}_busy_percent']:.0f} %", f"of the time with GPU {at} busy"
        if "resident_bytes" in totals:
            yield format_bytes(totals["resident_bytes"]), "peak host memory"
        if "processor_percent" in totals:
            yield f"{totals['processor_percent']:.0f} %", "of one processor core on average"

    def charts(self) -> Iterator[Chart]:
        """Yield a chart of each GPU that was used, and one of the host."""
        for at in self._used_gpus():
            held = {"held-line": f"gpu{at}_process_bytes", "all-line": f"gpu{at}_used_bytes"}
            yield self._chart(f"gpu{at}", self.gpus[at], held, f"gpu{at}_busy_percent", "busy, %")
        held = {"held-line": "resident_bytes"}
        yield self._chart("host", "Host", held, "processor_percent", "of a processor core, %")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the most bytes and the mean percents."""
        about = {"what": self.what, "began": self.began, "seconds": self.seconds}
        return {**about, "gpus": list(self.gpus), **self.totals()}

    def __str__(self) -> str:
        rows = [f"  {number:<12}{words}" for number, words in self.numbers()]
        return "\n".join([f"{self.what}: {format_clock(self.seconds)}", *rows])

    def _used_gpus(self) -> list[int]:
        """Return the GPUs on which the process was seen; all, where it was seen on none."""
        every = range(len(self.gpus))
        return [at for at in every if f"gpu{at}_process_bytes" in self.totals()] or list(every)

    def _chart(
        self, name: str, heading: str, held: Mapping[str, str], use: str, unit: str
    ) -> Chart:
        totals = self.totals()
        known = {kind: column for kind, column in held.items() if column in totals}
        in_bytes, size = scale_for(max((totals[column] for column in known.values()), default=1))
        memory = {kind: self._course(column, size) for kind, column in known.items()}
        shown = _drawn(name, f"Memory of {heading}", f"memory, {in_bytes}", memory, self.seconds)
        if len(known) > 1:
            shown += legend(_LINES)
        if use in totals:
            course = {"use-line": self._course(use, 1)}
            shown += _drawn(f"{name}-use", f"Use of {heading}", unit, course, self.seconds)
        return Chart(name, heading, "", shown)

    def _course(self, column: str, size: int) -> list[tuple[float, float]]:
        """Return (seconds, value) of a column where it is known."""
        return [
            (sample.seconds, value / size)
            for sample in self.samples
            if (value := sample.values.get(column)) is not None
        ]


_LINES = {"held-line": "the process", "all-line": "all processes"}


def _drawn(
    name: str,
    title: str,
    y_title: str,
    courses: Mapping[str, Sequence[tuple[float, float]]],
    seconds: float,
) -> str:
    """Return lines over time as HTML, by the class of their colour."""
    values = [value for course in courses.values() for _, value in course]
    most = max(values, default=1.0)
    about = f"From 0 to {seconds:.0f} seconds; the most is {most:.4g} ({y_title})."
    plot = Plot(name, title, about, height=170, x_end=seconds, y_end=1.1 * most)
    plot.axes("seconds", y_title)
    for kind, course in courses.items():
        plot.line(course, kind)
    return plot.drawn()


def _merged(samples: Sequence[Sample]) -> Sample:
    """Return one sample for all of these, at the time of the last."""
    values: dict[str, float | None] = {}
    for name in samples[-1].values:
        known = [value for each in samples if (value := each.values[name]) is not None]
        if not known:
            values[name] = None
        else:
            values[name] = max(known) if name.endswith("_bytes") else sum(known) / len(known)
    return Sample(samples[-1].seconds, values)
