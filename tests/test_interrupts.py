"""Ctrl-C waits for the end of what must be finished, and is then answered."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from autofit.interrupts import (
    ended_like_interrupted,
    interrupts_deferred,
    interrupts_remembered,
)


def interrupted_twice(done: list[str]) -> None:
    with interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        done.append("after the first")
        signal.raise_signal(signal.SIGINT)
        done.append("after the second")


def test_is_answered_once_the_body_is_done() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice(done)
    assert done == ["after the first", "after the second"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored() -> None:
    done: list[str] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupted_twice(done)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(done) == 2


def test_the_handler_that_the_body_put_in_force_answers() -> None:
    answered: list[int] = []

    def finish() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            signal.signal(signal.SIGINT, lambda number, _: answered.append(number))

    try:
        finish()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert answered == [signal.SIGINT]


def test_does_nothing_in_other_threads() -> None:
    handlers: list[object] = []

    def body() -> None:
        with interrupts_deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_an_interrupt_is_raised_at_once_and_remembered() -> None:
    with interrupts_remembered() as interrupts:
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_is_left_alone() -> None:
    came: list[int] = []

    def own(number: int, _: object) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        with interrupts_remembered() as interrupts:
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT]


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


@pytest.mark.usefixtures("sigterm")
def test_sigterm_waits_too() -> None:
    done: list[str] = []

    def finish() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGTERM)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        finish()
    assert done == ["the rest"]


@pytest.mark.usefixtures("sigterm")
def test_sigterm_is_remembered_where_a_finalizer_swallows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swallowed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: swallowed.append(lost.exc_type))
    with interrupts_remembered() as interrupts:
        interrupts.check()
        weakref.finalize(
            interrupted := type("Object", (), {})(), signal.raise_signal, signal.SIGTERM
        )
        del interrupted
        assert swallowed == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


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
