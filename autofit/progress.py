"""What a person sees while a search runs: a live line, or plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from autofit.plan import Plan
from autofit.searching.events import (
    Confirming,
    Event,
    ProbeFinished,
    ProbeStarted,
    Progress,
    Vetoed,
)
from autofit.units import format_bytes, format_rate, format_seconds


class ProgressLine:
    """Shows a search's events on a stream; a context manager, and the `progress` of a search."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._live: Live | None = None

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
            self._show("looking the workload over")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if self._live is not None:
            if isinstance(event, ProbeStarted):
                self._live.update(_LiveLine(event))
            return
        line = plain_line(event)
        if line:
            self._console.print(Text(line), soft_wrap=True)

    def _show(self, text: str) -> None:
        assert self._live is not None  # only called with a terminal
        self._live.update(Spinner("line", Text(text)))


class _LiveLine:
    """The probe under way, with a clock that rich redraws."""

    def __init__(self, event: ProbeStarted) -> None:
        self._event = event
        self._started = time.monotonic()
        self._spinner = Spinner("line")

    def __rich__(self) -> Spinner:
        waited = time.monotonic() - self._started
        progress = self._event.progress
        left = progress.seconds_left
        parts = [
            f"probe {progress.probes + 1} ({self._event.role.value}): {_words(self._event.plan)}",
            _best(progress),
            f"{progress.oom_probes} OOM",
            format_seconds(progress.elapsed_s + waited),
        ]
        if left is not None:
            parts.append(f"at most {format_seconds(max(left - waited, 0.0))} left")
        if progress.probes_left is not None:
            parts.append(f"at most {progress.probes_left} probes left")
        self._spinner.update(text=Text(" | ".join(parts)))
        return self._spinner


def plain_line(event: Event) -> str | None:
    """One event as a line of text; None for those that say nothing new."""
    if isinstance(event, ProbeFinished):
        trial, measured = event.trial, event.trial.measurement
        speed = f", {format_rate(trial.samples_per_second)}" if trial.samples_per_second else ""
        held = f", held {format_bytes(measured.held_bytes)}" if measured.held_bytes else ""
        left = event.progress.seconds_left
        remaining = "" if left is None else f", at most {format_seconds(left)} left"
        return (
            f"[{format_seconds(event.progress.elapsed_s)}] probe {event.progress.probes} "
            f"({trial.role.value}): {_words(trial.plan)}: {measured.outcome.value}{speed}{held} | "
            f"{_best(event.progress)}, {event.progress.oom_probes} OOM{remaining}"
        )
    if isinstance(event, Vetoed):
        return f"refused before it ran: {_words(event.trial.plan)}"
    if isinstance(event, Confirming):
        return f"confirming the leading plans: {event.stopped_because}"
    return None


def _best(progress: Progress) -> str:
    if progress.best is None:
        return "nothing fits yet"
    return f"best {format_rate(progress.best.samples_per_second)}"


def _words(plan: Plan) -> str:
    return str(plan)
