"""The display of a running search, on a stream of its own.

In a terminal: one short line for each finished probe, and below them a live one with the current
probe, the best so far, OOMs so far and the time left; it never wraps. In a notebook: one line that
changes with each event. Elsewhere (a log): one plain line for each event, complete in itself.
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

from autofit.notebook import ChangingLine, in_notebook
from autofit.report.plain import for_terminal
from autofit.searching.events import Event, Progress, StageStarted
from autofit.searching.wording import EventWords, best_so_far, limits_left
from autofit.units import format_clock

_FRAMES = "-\\|/"
_FRAMES_PER_SECOND = 8


class ProgressLine:
    """Show a search's events on a stream; a context manager, and the `progress` of a search.

    Args:
        stream: where to write; None: standard error, or the cell of a notebook.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        shown = stream or sys.stderr
        self._console = Console(
            file=shown, highlight=False, quiet=shown is None, force_jupyter=False
        )
        self._live: Live | None = None
        self._cell = ChangingLine() if stream is None and in_notebook() else None
        self._last = _LiveLine("")
        self._words = EventWords()

    def __enter__(self) -> ProgressLine:
        if self._cell is None and self._console.is_terminal:
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
        if self._cell is not None:
            self._cell.show(self._last.standing())

    def show_stage(self, stage: str) -> None:
        """Show a stage that precedes the search."""
        self(StageStarted(stage, Progress(0, 0, None, 0.0, None, None)))

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self._words.learn(event)
        self._last = _LiveLine(self._words.doing(event), event.progress)
        if self._cell is not None:
            self._cell.show(f"{self._words.doing(event)} | {self._last.standing()}")
            return
        with self._while_written():
            if self._live is None:
                line = self._words.plain(event)
            else:
                line = self._words.finished(event)
                self._live.update(self._last, refresh=True)
            if line:
                self._console.print(Text(for_terminal(line)), soft_wrap=True)

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
        frame = _FRAMES[int(self._waited * _FRAMES_PER_SECOND) % len(_FRAMES)]
        line = f"{frame} {self._doing} | {self.standing()}"
        return Text(line, no_wrap=True, overflow="ellipsis")

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._since

    def standing(self) -> str:
        """Return the progress as of now."""
        waited, progress = self._waited, self._progress
        if progress is None:
            return format_clock(waited)
        clock = [format_clock(progress.elapsed_s + waited), *limits_left(progress, waited)]
        return " | ".join([best_so_far(progress), f"{progress.oom_probes} OOM", ", ".join(clock)])
