"""Keeps Ctrl-C from tearing apart what must be finished: putting state back, killing a worker."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Have a Ctrl-C wait until the body is done, then answer it with the handler in force then.

    The body must be bounded in time. Only the main thread is interrupted by Ctrl-C; elsewhere
    this does nothing.
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
