"""Ctrl-C: deferred while something must be finished (restoring, killing a worker), never lost.

So is SIGTERM, where it has a handler.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

_Result = TypeVar("_Result")
_LOOK_S = 0.2


@contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that a scheduler's stop still yields a report."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
        signal.default_int_handler(number, frame)
    signal.raise_signal(signal.SIGINT)


PATIENCE_S = 5.0
"""After a Ctrl-C, others are ignored for as long: what was measured is being written. The worker is
ended meanwhile, which takes less than a second unless a driver holds it."""


class Interrupts:
    """Whether Ctrl-C came: an import or a finalizer may swallow its KeyboardInterrupt."""

    def __init__(self) -> None:
        self._came_at: float | None = None

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C came."""
        if self._came_at is not None:
            raise KeyboardInterrupt

    def _answer(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._came_at is None or now - self._came_at > PATIENCE_S:
            self._came_at = now
            signal.default_int_handler(number, frame)


_ANSWERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _interrupt}


@contextmanager
def interrupts_remembered() -> Iterator[Interrupts]:
    """Note every Ctrl-C, and SIGTERM that counts as one, for `check`.

    A handler of the user's for Ctrl-C stays in force instead. Where they are remembered already,
    they are so by the same object.
    """
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(owner, Interrupts):
        yield owner
        return
    interrupts = Interrupts()
    is_users = signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_IGN)
    if is_users or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    ours = [number for number, answer in _ANSWERS.items() if signal.getsignal(number) is answer]
    for number in ours:
        signal.signal(number, interrupts._answer)
    try:
        yield interrupts
    finally:
        for number in ours:
            if signal.getsignal(number) == interrupts._answer:  # else the body put one in force
                signal.signal(number, _ANSWERS[number])


@contextmanager
def ended_after(seconds: float | None) -> Iterator[None]:
    """End the body after this many seconds, where it runs in the main thread.

    Raises:
        TimeoutError: they were over; whatever the body made of that is its cause.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    over = TimeoutError(seconds)

    def end(number: int, frame: FrameType | None) -> None:
        raise over

    before, ends_at = signal.signal(signal.SIGALRM, end), time.monotonic() + seconds
    # Again each second: a TimeoutError is an OSError, which the body may take for its own
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), 1.0)
    try:
        yield
    except BaseException as error:
        if error is over or time.monotonic() < ends_at or isinstance(error, KeyboardInterrupt):
            raise
        raise over from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interruptible(call: Callable[[], _Result], timeout_s: float | None = None) -> _Result:
    """Return the result of a call that delays signals, such as one into a C library.

    It has a thread of its own, which is left alone when Ctrl-C comes, or the time is over.

    Raises:
        TimeoutError: it is.
        Exception: what the call raises.
    """
    ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
    answer: Future[_Result] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    # Of an executor the interpreter would wait for the thread at its end
    threading.Thread(target=run, daemon=True).start()
    # With an end: a signal just before a wait without one begins does not end it
    while wait([answer], min(_LOOK_S, max(0.0, ends_at - time.monotonic()))).not_done:
        if time.monotonic() >= ends_at:
            raise TimeoutError(timeout_s)
    return answer.result()


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer a Ctrl-C until the body is done, then call the handler that is in force by then.

    So too a SIGTERM that a handler answers. The body must be bounded in time. Only the main thread
    receives signals; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: dict[int, FrameType | None] = {}

    def wait(number: int, frame: FrameType | None) -> None:
        came.setdefault(number, frame)

    handled = [number for number in _ANSWERS if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, wait) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is wait:  # else the body has set the one to be in force
                signal.signal(number, handler)
        for due, frame in came.items():
            answer = signal.getsignal(due)
            if callable(answer):
                answer(due, frame)
