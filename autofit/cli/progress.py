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

from autofit.searching.events import Event, Progress, StageStarted
from autofit.searching.wording import EventWords, best_so_far, limits_left
from autofit.units import format_clock

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
        self._words = EventWords()

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
        clock = [
            format_clock(self._progress.elapsed_s + waited),
            *limits_left(self._progress, waited),
        ]
        return [best_so_far(self._progress), f"{self._progress.oom_probes} OOM", ", ".join(clock)]
