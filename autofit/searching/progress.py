"""The display of a running search, on a stream of its own: one line.

It says what runs, the best so far, the probes done and the time left. In a terminal and in a
notebook the line changes; elsewhere (a log) it is written every half minute. Only what puts the
measurements in doubt stays as a line of its own.
"""

from __future__ import annotations

import sys
import time
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autofit.codec import for_terminal
from autofit.notebook import ChangingLine, in_notebook
from autofit.searching import events
from autofit.searching.events import (
    Event,
    EventWords,
    ProbeFinished,
    Progress,
    StageStarted,
    is_warning,
)
from autofit.streams import LossyStream

_FRAMES = "-\\|/"
_FRAMES_PER_SECOND = 8


class ProgressLine:
    """Show a search's events on a stream; a context manager, and the `progress` of a search.

    Args:
        stream: where to write; None: standard error, or the cell of a notebook.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        # Rich itself ends the program at a broken pipe
        shown = cast("IO[str]", LossyStream(stream or sys.stderr))
        self._console = Console(file=shown, highlight=False, force_jupyter=False)
        self._live: Live | None = None
        self._cell = ChangingLine() if stream is None and in_notebook() else None
        self._words = EventWords()
        self._last = _LiveLine("starting", self._words)
        self._written_at: float | None = None

    def __enter__(self) -> ProgressLine:
        if self._cell is None and self._console.is_terminal:
            self._live = Live(
                self._last,
                console=self._console,
                transient=True,
                refresh_per_second=_FRAMES_PER_SECOND,
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._cell is not None:
            self._cell.show(self._last.text())

    def show_stage(self, stage: str) -> None:
        """Show a stage before the search to someone who watches; a typo may end it at once."""
        if self._live is not None or self._cell is not None:
            self(StageStarted(stage, Progress(0, 0, None, 0.0, None, None)))

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self._words.learn(event)
        self._last = _LiveLine(self._words.doing(event), self._words, event.progress)
        if self._cell is not None:
            self._cell.show(self._last.text())
            return
        if self._live is not None:
            self._live.update(self._last, refresh=True)
        if self._is_due(event) and (line := self._words.line(event)):
            self._written_at = time.monotonic()
            self._console.print(Text(for_terminal(line)), soft_wrap=True)

    def _is_due(self, event: Event) -> bool:
        """Return whether the event gets a line that stays: the first probe does in any log."""
        if is_warning(event) or self._live is not None:
            return is_warning(event)
        if self._written_at is None or (
            isinstance(event, ProbeFinished) and event.progress.probes == 1
        ):
            return True
        return time.monotonic() - self._written_at >= events.SECONDS_BETWEEN


class _LiveLine:
    """What runs and the progress, with a clock that rich redraws."""

    def __init__(self, doing: str, words: EventWords, progress: Progress | None = None) -> None:
        self._doing, self._words, self._progress = doing, words, progress
        self._since = time.monotonic()

    def __rich__(self) -> Text:
        frame = _FRAMES[int(self._waited_s * _FRAMES_PER_SECOND) % len(_FRAMES)]
        return Text(f"{frame} {self.text()}", no_wrap=True, overflow="ellipsis")

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._since

    def text(self) -> str:
        """Return the line as of now."""
        waited_s, progress = self._waited_s, self._progress
        elapsed_s = waited_s + (progress.elapsed_s if progress else 0.0)
        standing = self._words.standing(progress, waited_s) if progress else []
        # What runs comes last: a narrow terminal cuts it first.
        return f"{events.clock(elapsed_s)}{' | '.join([*standing, self._doing])}"
