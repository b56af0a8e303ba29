"""Ctrl-C: deferred while something must be finished (restoring, killing a worker), never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Whether Ctrl-C came: an import or a finalizer may swallow its KeyboardInterrupt."""

    def __init__(self) -> None:
        self._came = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C came."""
        if self._came:
            raise KeyboardInterrupt

    def _answer(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        signal.default_int_handler(number, frame)


@contextmanager
def interrupts_remembered() -> Iterator[Interrupts]:
    """Note every Ctrl-C for `check`; a signal handler of the user's stays in force instead."""
    interrupts = Interrupts()
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts._answer)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer a Ctrl-C until the body is done, then call the handler that is in force by then.

    The body must be bounded in time. Only the main thread receives Ctrl-C; elsewhere this does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []

    def wait(_: int, frame: FrameType | None) -> None:
        came.append(frame)

    handler = signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is wait:  # else the body has set the one to be in force
            signal.signal(signal.SIGINT, handler)
        answer = signal.getsignal(signal.SIGINT)
        if came and callable(answer):
            answer(signal.SIGINT, came[0])
