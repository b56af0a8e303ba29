"""Workers that hang, die and flood: real child processes, and the search goes on after each."""

from __future__ import annotations

import builtins
import ctypes
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import WorkerFailed
from autofit.measurement import Outcome
from autofit.probing.worker_channel import oom_kills, outcome_of_death
from tests.faulty_model import NO_FAULT, FaultyModel

SECONDS_TO_HANG = 600


def hangs(model: Any, output: torch.Tensor) -> None:
    time.sleep(SECONDS_TO_HANG)


def hangs_ignoring_sigterm(model: Any, output: torch.Tensor) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(SECONDS_TO_HANG)


def hangs_in_a_deadlock(model: Any, output: torch.Tensor) -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def hangs_in_native_code_with_the_interpreter_locked(model: Any, output: torch.Tensor) -> None:
    ctypes.PyDLL(None).sleep(SECONDS_TO_HANG)


def stops(model: Any, output: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_killed(model: Any, output: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(model: Any, output: torch.Tensor) -> None:
    ctypes.string_at(0)


def aborts(model: Any, output: torch.Tensor) -> None:
    os.abort()


def exits(model: Any, output: torch.Tensor) -> None:
    print("these are my last words")
    os._exit(3)


def crashes_with_a_child_alive(model: Any, output: torch.Tensor) -> None:
    """As a loader does: the child inherits the worker's pipes, and outlives it for a while."""
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(SECONDS_TO_HANG,)).start()
    os.abort()


def starts_strays(model: Any, output: torch.Tensor) -> None:
    """One child in a session of its own, and a daemon whose parent has ended."""
    nap = [sys.executable, "-S", "-c", f"import time; time.sleep({SECONDS_TO_HANG})"]
    child = subprocess.Popen(nap, start_new_session=True)
    go_away = (
        "import subprocess; print(subprocess.Popen("
        f"{nap}, start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    )
    daemon = subprocess.run([sys.executable, "-S", "-c", go_away], stdout=subprocess.PIPE)
    raise LookupError(child.pid, int(daemon.stdout))


def writes_to_every_pipe(model: Any, output: torch.Tensor) -> None:
    answers = b"".join(
        b'{"number": %d, "reply": "gASV", "exception": null}\n' % n for n in range(20)
    )
    for descriptor in range(3, 64):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, b"\xff no message\n[1]\n" + answers)


def forks(model: Any, output: torch.Tensor) -> None:
    """And the child goes on as if it were the worker."""
    if not hasattr(builtins, "has_forked"):
        vars(builtins)["has_forked"] = True
        os.fork()


def floods(model: Any, output: torch.Tensor) -> None:
    line = b"x" * 2**20  # one endless line to each stream, then many short ones
    for _ in range(4):
        os.write(1, line)
        os.write(2, line)
    for number in range(1000):
        print("noise", number)
        print("noise", number, file=sys.stderr)


HANGS: dict[Any, str] = {
    hangs: "in hangs",
    hangs_ignoring_sigterm: "in hangs_ignoring_sigterm",
    hangs_in_a_deadlock: "in hangs_in_a_deadlock",
    hangs_in_native_code_with_the_interpreter_locked: "with_the_interpreter_locked",
    stops: "stopped",
}
DEATHS: dict[Any, str] = {
    is_killed: "SIGKILL",
    crashes: "SIGSEGV",
    aborts: "SIGABRT",
    exits: "these are my last words",
    crashes_with_a_child_alive: "SIGABRT",
}
OTHERS = (floods, starts_strays, writes_to_every_pipe, forks)
SIZES = {fault: size for size, fault in enumerate([*HANGS, *DEATHS, *OTHERS], start=10)}


@pytest.fixture(scope="module")
def probing(open_module_probing: Any) -> Any:
    """One prober for all; whatever happens, its next probe must be well again."""
    faults = {size: fault for fault, size in SIZES.items()}
    return open_module_probing(FaultyModel(faults), shortest_s=1.0)


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(hang, marks=[pytest.mark.slow] * (hang is not hangs)) for hang in HANGS),
        *DEATHS,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_hang_or_a_death_costs_one_probe_and_is_told(
    probing: Any, running: Callable[[int], bool], fault: Any
) -> None:
    assert probing.at(NO_FAULT).ok
    lost = probing.worker
    measurement = probing.at(SIZES[fault], patient=fault in DEATHS)
    assert measurement.outcome is (Outcome.TIMEOUT if fault in HANGS else Outcome.CRASHED)
    # what a hang cost counts against the search's time
    assert measurement.seconds >= 1.0 or fault in DEATHS
    assert (HANGS | DEATHS)[fault] in measurement.detail
    assert not running(lost)
    assert probing.at(NO_FAULT).ok
    assert probing.worker != lost


def test_much_output_harms_nothing(probing: Any) -> None:
    assert probing.at(NO_FAULT).ok
    worker = probing.worker
    assert probing.at(SIZES[floods]).ok
    assert probing.worker == worker
    assert len(probing.prober._channel.process._tail) <= 64 * 2**10


@pytest.mark.parametrize("noise", [writes_to_every_pipe, forks])
def test_every_answer_is_to_the_question(probing: Any, noise: Any) -> None:
    assert probing.at(SIZES[noise]).ok
    small, large, small_again = [probing.at(size).peak_allocated_bytes for size in (2, 512, 2)]
    assert small == small_again < large


def test_what_the_users_code_started_ends_with_the_worker(
    probing: Any, running: Callable[[int], bool]
) -> None:
    assert probing.at(NO_FAULT).ok
    threads = list(probing.prober._channel.process._threads)
    assert probing.at(SIZES[starts_strays]).outcome is Outcome.USER_ERROR
    strays = probing.raised.args
    assert all(map(running, strays))
    probing.prober.renew()
    assert not any(map(running, strays))
    assert not any(thread.is_alive() for thread in threads), "their pipes have ended"


def test_a_crash_shows_its_stack(probing: Any) -> None:
    assert "in crashes" in probing.at(SIZES[crashes]).detail


def test_a_kill_by_the_kernel_is_host_memory() -> None:
    """The kernel cannot be made to kill in a test; its counter can have moved."""
    kills = oom_kills()
    assert outcome_of_death(-signal.SIGKILL, kills) is Outcome.CRASHED
    assert kills is not None
    assert outcome_of_death(-signal.SIGKILL, kills - 1) is Outcome.HOST_OOM
    assert outcome_of_death(-signal.SIGKILL, None) is Outcome.HOST_OOM
    assert outcome_of_death(-signal.SIGSEGV, kills - 1) is Outcome.CRASHED


def test_a_worker_that_cannot_start_says_why(
    open_probing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(WorkerFailed, match="/nonexistent/python"):
        open_probing(FaultyModel({8: exits}))


def test_a_worker_that_dies_in_the_survey_says_how(open_probing: Any) -> None:
    def builds() -> nn.Module:
        os._exit(7)

    with pytest.raises(WorkerFailed, match=r"\b7\b"):
        open_probing(builds).prober.survey()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 4 KiB; soon over, since pytest may write to one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_says_what_to_do(open_probing: Any) -> None:
    with full_disk(), pytest.raises(WorkerFailed, match="TMPDIR"):
        open_probing(nn.Linear(64, 64))
