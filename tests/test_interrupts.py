"""Ctrl-C while a library of C waits."""

from __future__ import annotations

import signal
import threading

import pytest

from autofit.errors import InvalidArgument
from autofit.interrupts import interruptible
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


def test_a_store_that_does_not_answer_is_given_up_when_the_search_ends() -> None:
    nowhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(InvalidArgument, match=r"127\.0\.0\.1:1"):
        torchrun._store(World(1, 1, 2), nowhere, ends_at=0.0)
