"""Ctrl-C while a library of C waits."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from autofit.errors import InvalidArgument
from autofit.interrupts import ended_after, interruptible
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
    swallowed = 0

    def wait_twice() -> None:
        nonlocal swallowed
        while swallowed < 2:
            try:
                time.sleep(60)
            except OSError:  # as of a server that does not answer
                swallowed += 1
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


def test_a_store_that_does_not_answer_is_given_up_when_the_search_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(InvalidArgument, match=r"127\.0\.0\.1:1"):
        torchrun._store(World(1, 1, 2), ends_at=0.0)


@pytest.mark.parametrize("port", [None, "no number", "1000000"])
def test_ranks_that_are_not_told_where_to_meet_are_told_so(
    port: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(InvalidArgument, match="MASTER_PORT"):
        torchrun._store(World(1, 1, 2))
