"""The display of a running search, on a stream of its own.

In a terminal: one short line for each finished probe, and below them a live one with the current
probe, the best so far, OOMs so far and the time left; it never wraps. Elsewhere (a log): one plain
line for each event, complete in itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autofit.measurement import Measurement, Role
from autofit.plan import Plan, Settings
from autofit.searching.events import (
    Confirming,
    Event,
    MachineBusy,
    ProbeFinished,
    ProbeStarted,
    Progress,
    Repeating,
    StageStarted,
    Vetoed,
)
from autofit.units import counted, format_bytes, format_clock, format_rate

_FRAMES = "-\\|/"
_FRAMES_PER_SECOND = 8


class ProgressLine:
    """Show a search's events on a stream; a context manager, and the `progress` of a search.

    Args:
        stream: where to write; None: standard error.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        shown = stream or sys.stderr
        self._console = Console(file=shown, highlight=False, quiet=shown is None)
        self._live: Live | None = None
        self._words = _Wording()

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            line = _LiveLine("starting")
            self._live = Live(
                line, console=self._console, transient=True, refresh_per_second=_FRAMES_PER_SECOND
            )
            with self._while_written():
                self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            with self._while_written():
                self._live.stop()
            self._live = None

    def show_stage(self, stage: str) -> None:
        """Show a stage that precedes the search."""
        self(StageStarted(stage, Progress(0, 0, None, 0.0, None, None)))

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self._words.learn(event)
        with self._while_written():
            if self._live is None:
                line = self._words.plain(event)
            else:
                line = self._words.finished(event)
                now = _LiveLine(self._words.doing(event), event.progress)
                self._live.update(now, refresh=True)
            if line:
                self._console.print(Text(line), soft_wrap=True)

    @contextmanager
    def _while_written(self) -> Iterator[None]:
        """Fall silent where the stream takes no more: a full disk must not end a search."""
        try:
            yield
        except OSError:
            self._console.quiet = True


class _LiveLine:
    """The current activity and the progress, with a clock that rich redraws."""

    def __init__(self, doing: str, progress: Progress | None = None) -> None:
        self._doing, self._progress = doing, progress
        self._since = time.monotonic()

    def __rich__(self) -> Text:
        waited = time.monotonic() - self._since
        frame = _FRAMES[int(waited * _FRAMES_PER_SECOND) % len(_FRAMES)]
        parts = [f"{frame} {self._doing}", *self._standing(waited)]
        return Text(" | ".join(parts), no_wrap=True, overflow="ellipsis")

    def _standing(self, waited: float) -> list[str]:
        if self._progress is None:
            return [format_clock(waited)]
        clock = [format_clock(self._progress.elapsed_s + waited), *_left(self._progress, waited)]
        return [_best(self._progress), f"{self._progress.oom_probes} OOM", ", ".join(clock)]


class _Wording:
    """Events as text; plans without the settings that equal the baseline's."""

    def __init__(self) -> None:
        self._plain: Settings = {}

    def learn(self, event: Event) -> None:
        """Remember the baseline's settings; a resumed search has none, and shows plans in full."""
        if isinstance(event, ProbeStarted) and event.role is Role.BASELINE:
            self._plain = event.plan.settings

    def doing(self, event: Event) -> str:
        """Describe the activity that follows the event."""
        if isinstance(event, ProbeStarted):
            number = event.progress.probes + 1
            return f"probe {number} ({event.role.value}) {self._plan(event.plan)}"
        if isinstance(event, Repeating):
            return f"probe {event.progress.probes + 1} again {self._plan(event.plan)}"
        if isinstance(event, StageStarted):
            return event.stage
        return "confirming the leading plans" if isinstance(event, Confirming) else "choosing"

    def finished(self, event: Event) -> str | None:
        """Describe the result of the event; the live line shows the rest."""
        if isinstance(event, ProbeFinished):
            return f"probe {event.progress.probes} ({event.trial.role.value}) {self._trial(event)}"
        return None if isinstance(event, StageStarted) else self.plain(event)

    def plain(self, event: Event) -> str | None:
        """Return the event as a complete line; None where it adds nothing."""
        progress = event.progress
        if isinstance(event, ProbeFinished):
            standing = [_best(progress), f"{progress.oom_probes} OOM", *_left(progress)]
            return (
                f"[{format_clock(progress.elapsed_s)}] probe {progress.probes} "
                f"({event.trial.role.value}) {self._trial(event)} | {', '.join(standing)}"
            )
        if isinstance(event, Vetoed):
            return f"refused before it ran: {self._plan(event.trial.plan)}"
        if isinstance(event, Confirming):
            return f"confirming the leading plans: {event.stopped_because}"
        if isinstance(event, MachineBusy):
            return f"the machine is busy: {event.how}"
        if isinstance(event, StageStarted):
            return f"[{format_clock(progress.elapsed_s)}] {event.stage}"
        if isinstance(event, Repeating):
            ended = event.first.outcome.value
            return f"{self._plan(event.plan)}: {ended}{_why(event.first)}, again in a fresh worker"
        return None

    def _trial(self, event: ProbeFinished) -> str:
        trial, measured = event.trial, event.trial.measurement
        parts = [measured.outcome.value]
        if trial.samples_per_second:
            parts.append(format_rate(trial.samples_per_second))
        if measured.held_bytes:
            parts.append(f"held {format_bytes(measured.held_bytes)}")
        return f"{self._plan(trial.plan)}: {', '.join(parts)}{_why(measured)}"

    def _plan(self, plan: Plan) -> str:
        return str(plan.without(self._plain))


def _why(measured: Measurement) -> str:
    """Return the first line of the detail, where the outcome alone is not clear."""
    if measured.ok or measured.outcome.about_memory or not measured.detail:
        return ""
    return f" ({measured.detail.strip().partition(chr(10))[0]})"


def _best(progress: Progress) -> str:
    if progress.best is None:
        return "nothing fits yet"
    return f"best {format_rate(progress.best.samples_per_second)}"


def _left(progress: Progress, waited: float = 0.0) -> list[str]:
    """Return the limits on the remaining time and probes, if any."""
    left = []
    if progress.seconds_left is not None:
        left.append(format_clock(max(progress.seconds_left - waited, 0.0)))
    if progress.probes_left is not None:
        left.append(counted(progress.probes_left, "probe"))
    return [f"at most {' or '.join(left)} left"] if left else []
