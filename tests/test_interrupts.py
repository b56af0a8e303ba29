"""Ctrl-C and SIGTERM: while a library of C waits, while work must be finished, and at the start."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from autofit.errors import InvalidArgument
from autofit.interrupts import (
    ended_after,
    ended_like_interrupted,
    interruptible,
    interrupts_deferred,
    interrupts_remembered,
)
from autofit.probing import torchrun
from autofit.strategy import World


def test_a_call_that_lets_signals_wait_returns_or_raises_as_it_would() -> None:
    assert interruptible(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)


def test_ctrl_c_leaves_it_alone() -> None:
    running, never = threading.Event(), threading.Event()
    main = threading.main_thread().ident or 0

    def wait() -> None:
        running.set()
        never.wait()

    def interrupt() -> None:
        running.wait()
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        interruptible(wait)
    never.set()


def test_what_takes_too_long_is_ended_however_often_it_goes_on() -> None:
    def wait_twice() -> None:
        for _ in range(2):
            with suppress(OSError):  # as of a server that does not answer
                time.sleep(60)
        raise LookupError("another error for it")

    with pytest.raises(TimeoutError) as raised, ended_after(0.1):
        wait_twice()
    assert isinstance(raised.value.__cause__, LookupError)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_is_quick_enough_is_not_ended() -> None:
    with pytest.raises(TimeoutError, match="its own"), ended_after(1000.0):
        raise TimeoutError("its own")
    for seconds in (None, 1000.0):
        with ended_after(seconds):
            pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("port", "words"),
    [
        (None, "MASTER_PORT"),
        ("no number", "MASTER_PORT"),
        ("1000000", "MASTER_PORT"),
        ("1", r"127\.0\.0\.1:1"),  # does not answer, and is given up when the search ends
    ],
)
def test_ranks_that_cannot_meet_are_told_so(
    port: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(InvalidArgument, match=words):
        torchrun._store(World(1, 1, 2), ends_at=0.0)


# -- Ctrl-C waits for the end of what must be finished, and is then answered


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["default", "ignored"])
def sigterm(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGTERM counts as Ctrl-C, which itself may be ignored, as a shell's "&" leaves it."""
    before = signal.signal(signal.SIGINT, request.param)
    try:
        with ended_like_interrupted():
            yield
        assert signal.getsignal(signal.SIGINT) is request.param
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def answered(number: signal.Signals) -> list[str]:
    """What is done where that signal comes twice, which is then answered."""
    done: list[str] = []

    def finish() -> None:
        with interrupts_deferred():
            for time_of_it in ("first", "second"):
                signal.raise_signal(number)
                done.append(f"after the {time_of_it}")

    with pytest.raises(KeyboardInterrupt):
        finish()
    return done


def test_is_answered_once_the_body_is_done() -> None:
    assert answered(signal.SIGINT) == ["after the first", "after the second"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("sigterm")
def test_sigterm_waits_too() -> None:
    assert answered(signal.SIGTERM) == ["after the first", "after the second"]


def test_a_handler_of_the_users_is_left_alone() -> None:
    came: list[int] = []
    own = lambda number, _: came.append(number)  # noqa: E731 - as users write it
    before = signal.signal(signal.SIGINT, own)
    try:
        with interrupts_remembered() as interrupts:
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT]


def test_ctrl_c_while_the_command_line_is_imported_ends_it_without_a_traceback() -> None:
    program = """
import runpy, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["doctor"]
runpy.run_module("autofit", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
