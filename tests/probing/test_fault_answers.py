"""What a probe answers when something goes wrong in its worker, and the search goes on after it.

Workers live on, leave something behind, hang, die and flood: all in real processes.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import multiprocessing
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.base import Device
from autofit.errors import DeviceUnavailable, WorkerFailed
from autofit.measurement import Outcome
from autofit.probing.worker_channel import oom_kills, outcome_of_death
from autofit.units import GIB, MIB
from tests.faulty_model import (
    NO_FAULT,
    Fault,
    FaultyModel,
    runs_out_in_backward,
    runs_out_in_forward,
)
from tests.probing.test_faults import accelerator_error

SECONDS_TO_HANG = 600
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 MiB"


class OwnError(ValueError):
    """An exception of the user's, with more than a text."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


class Unsendable(ValueError):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("it holds a generator", (row for row in [1]))


def raises(make: Callable[[], BaseException]) -> Fault:
    def fault(model: Any, output: torch.Tensor) -> object:
        raise make()

    return fault


def exhausts_address_space(model: Any, output: torch.Tensor) -> object:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 256 * MIB, limits[1]))
    try:
        return torch.empty(GIB, dtype=torch.uint8, device="cpu").sum()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def fills_memory_and_fails(model: Any, output: torch.Tensor) -> object:
    held = torch.empty(62 * MIB)  # of 256 MiB
    raise accelerator_error(2) from LookupError(held.numel())


def is_unlucky_once(model: Any, output: torch.Tensor) -> None:
    if not hasattr(builtins, "was_unlucky"):
        vars(builtins)["was_unlucky"] = True
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def makes_cycles(model: Any, output: torch.Tensor) -> None:
    gc.disable()  # else it depends on the mood of the collector what is seen
    box: list[object] = [output * 2]
    box.append(box)


LIVES_ON: dict[str, tuple[Outcome, Fault]] = {
    "OOM in forward": (Outcome.OOM, runs_out_in_forward),
    "OOM in backward": (Outcome.OOM, runs_out_in_backward),
    "code 2 at the end of memory": (Outcome.OOM, fills_memory_and_fails),
    "address space": (Outcome.HOST_OOM, exhausts_address_space),
    "exit": (Outcome.USER_ERROR, raises(lambda: SystemExit(2))),
    "NaN": (Outcome.NONFINITE, lambda _, output: output * float("nan")),
    "spurious OOM": (Outcome.OK, is_unlucky_once),
    "leak": (Outcome.LEAK, lambda model, output: model.kept.append(output.sum())),
    "cycle": (Outcome.OK, makes_cycles),
    "own error": (Outcome.USER_ERROR, raises(lambda: OwnError("no such token", 7))),
    "unsendable": (Outcome.USER_ERROR, raises(Unsendable)),
}
COSTS_THE_WORKER: dict[str, tuple[Outcome, Fault]] = {
    "device assert": (Outcome.POISONED, raises(lambda: accelerator_error(710))),
    "retained memory": (
        Outcome.OK,
        lambda *_: [vars(builtins).setdefault("hoard", torch.zeros(4 * MIB))],
    ),
}


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


def crashes(model: Any, output: torch.Tensor) -> None:
    ctypes.string_at(0)


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
    for descriptor in (1, 2) * 4:
        os.write(descriptor, line)
    for stream in (sys.stdout, sys.stderr) * 1000:
        print("noise", file=stream)


HANGS: dict[str, Fault] = {
    "in hangs": hangs,
    "in hangs_ignoring_sigterm": hangs_ignoring_sigterm,
    "in hangs_in_a_deadlock": hangs_in_a_deadlock,
    "with_the_interpreter_locked": hangs_in_native_code_with_the_interpreter_locked,
    "stopped": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
}
"""By words that tell of them."""
DEATHS: dict[str, Fault] = {
    "SIGKILL": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "in crashes": crashes,
    "SIGABRT": lambda *_: os.abort(),
    "these are my last words": exits,
    "killed by SIGABRT": crashes_with_a_child_alive,
}
OTHERS = {each.__name__: each for each in (floods, starts_strays, writes_to_every_pipe, forks)}
FAULTS: dict[str, Fault] = {
    **{name: fault for name, (_, fault) in (LIVES_ON | COSTS_THE_WORKER).items()},
    **HANGS,
    **DEATHS,
    **OTHERS,
}
SIZES = {name: size for size, name in enumerate(FAULTS, start=10)}


@pytest.fixture(scope="module")
def probing(open_module_probing: Any) -> Any:
    """One model for all faults, and one worker as long as they leave it alive."""
    faults = {SIZES[name]: fault for name, fault in FAULTS.items()}
    return open_module_probing(FaultyModel(faults), vram_budget="256MiB", shortest_s=2.0)


@pytest.mark.parametrize("fault", LIVES_ON)
def test_a_fault_is_recognized_and_the_worker_lives_on(probing: Any, fault: str) -> None:
    before = probing.at(NO_FAULT)
    worker = probing.worker
    measurement = probing.at(SIZES[fault])
    assert measurement.outcome is LIVES_ON[fault][0], measurement.detail
    after = probing.at(NO_FAULT)
    assert after.outcome is Outcome.OK
    assert after.peak_allocated_bytes == before.peak_allocated_bytes, "something was left behind"
    assert probing.worker == worker


def test_the_users_own_error_arrives_as_it_was_raised(probing: Any) -> None:
    probing.at(SIZES["own error"])
    error = probing.raised
    assert type(error) is OwnError
    assert error.args == ("no such token", 7)
    assert error.code == 7
    assert "in fault" in str(error.__cause__), "the worker's traceback comes along"


def test_a_leak_says_how_much_and_how_long(probing: Any) -> None:
    assert re.search(r"\b512 B\b.*\d+ steps", probing.at(SIZES["leak"]).detail)


def test_out_of_memory_in_the_optimizer(open_probing: Any) -> None:
    """The model fits, and so do its gradients; what Adam keeps of it does not."""
    probing = open_probing(nn.Linear(16, 300_000))
    worker = probing.worker
    measurement = probing.at(NO_FAULT)
    assert measurement.outcome is Outcome.OOM
    assert "Tried to allocate" in measurement.detail
    assert probing.worker == worker


@pytest.mark.parametrize("fault", COSTS_THE_WORKER)
def test_what_a_probe_leaves_behind_costs_the_worker(probing: Any, fault: str) -> None:
    assert probing.at(NO_FAULT).ok
    worker = probing.worker
    assert probing.at(SIZES[fault]).outcome is COSTS_THE_WORKER[fault][0]
    assert probing.worker is None
    assert probing.at(NO_FAULT).ok
    assert probing.worker != worker


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(hang, marks=[pytest.mark.slow] * (hang != "in hangs")) for hang in HANGS),
        *DEATHS,
    ],
)
def test_a_hang_or_a_death_costs_one_probe_and_is_told(
    probing: Any, running: Callable[[int], bool], fault: str
) -> None:
    assert probing.at(NO_FAULT).ok
    lost = probing.worker
    measurement = probing.at(SIZES[fault], patient=fault in DEATHS)
    assert measurement.outcome is (Outcome.TIMEOUT if fault in HANGS else Outcome.CRASHED)
    # what a hang cost counts against the search's time
    assert measurement.seconds >= 2.0 or fault in DEATHS
    assert fault in measurement.detail
    assert not running(lost)
    assert probing.at(NO_FAULT).ok
    assert probing.worker != lost


def test_much_output_harms_nothing(probing: Any) -> None:
    assert probing.at(NO_FAULT).ok
    worker = probing.worker
    assert probing.at(SIZES["floods"]).ok
    assert probing.worker == worker
    assert len(probing.prober._channel.process._tail) <= 64 * 2**10


@pytest.mark.parametrize("noise", ["writes_to_every_pipe", "forks"])
def test_every_answer_is_to_the_question(probing: Any, noise: str) -> None:
    assert probing.at(SIZES[noise]).ok
    small, large, small_again = [probing.at(size).peak_allocated_bytes for size in (2, 512, 2)]
    assert small == small_again < large


def test_what_the_users_code_started_ends_with_the_worker(
    probing: Any, running: Callable[[int], bool]
) -> None:
    assert probing.at(NO_FAULT).ok
    threads = list(probing.prober._channel.process._threads)
    assert probing.at(SIZES["starts_strays"]).outcome is Outcome.USER_ERROR
    strays = probing.raised.args
    assert all(map(running, strays))
    probing.prober.renew()
    assert not any(map(running, strays))
    assert not any(thread.is_alive() for thread in threads), "their pipes have ended"


# -- Devices that are ill, full or shared


def dies_unseen(device: Any) -> Device:
    """The first probe's steps succeed; only the look at the device afterwards shows the fault."""
    checks = iter(["before the probe", "after it"])

    def check_health() -> None:
        if next(checks, None) != "before the probe":
            raise accelerator_error(700)

    device.check_health = check_health
    return device


def test_a_device_that_died_unseen_is_found_before_ok_is_said(open_probing: Any) -> None:
    probing = open_probing(FaultyModel(), tamper=dies_unseen)
    measurement = probing.at(NO_FAULT)
    assert measurement.outcome is Outcome.POISONED
    assert measurement.step_times_s == ()
    assert probing.worker is None


def is_full(device: Any) -> Device:
    """Others hold so much of the device that not even the look at it finds room."""
    finds_no_room: Any = raises(lambda: torch.OutOfMemoryError(OUT_OF_MEMORY))
    device.check_health = partial(finds_no_room, None, None)
    return device


def test_a_full_device_is_not_taken_for_a_failed_one(open_probing: Any) -> None:
    probing = open_probing(FaultyModel(), tamper=is_full)
    worker = probing.worker
    assert probing.at(NO_FAULT).ok
    assert probing.worker == worker


HELD_BY_OTHERS = "GIB_HELD_BY_OTHERS"
"""What the worker's device says that other processes hold; models move it while they run."""


def is_shared(device: Any) -> Device:
    """A device of 32 GiB, on which others hold 2 GiB to begin with."""
    device.total_bytes = 32 * GIB
    device.foreign_bytes = lambda: int(os.environ.get(HELD_BY_OTHERS, 2)) * GIB
    return device


def others_leave(model: Any, output: torch.Tensor) -> None:
    os.environ[HELD_BY_OTHERS] = "2"


def others_take_all(model: Any, output: torch.Tensor) -> None:
    os.environ[HELD_BY_OTHERS] = "32"


def others_take_all_and_it_runs_out(model: Any, output: torch.Tensor) -> object:
    os.environ[HELD_BY_OTHERS] = "32"
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def others_come_and_go(model: Any, output: torch.Tensor) -> None:
    os.environ[HELD_BY_OTHERS] = str((int(os.environ.get(HELD_BY_OTHERS, 2)) + 2) % 32)


OTHERS_DO = [others_leave, others_take_all, others_take_all_and_it_runs_out, others_come_and_go]


@pytest.fixture(scope="module")
def shared_device(open_module_probing: Any) -> Any:
    """One worker for everything that others may do."""
    faults = dict(enumerate(OTHERS_DO, start=10))
    return open_module_probing(FaultyModel(faults), tamper=is_shared)


@pytest.mark.parametrize(
    ("before", "amid", "contended", "outcome"),
    [
        (others_leave, others_leave, False, Outcome.OK),
        (others_take_all, others_leave, True, Outcome.OK),
        (others_leave, others_come_and_go, True, Outcome.OK),
        (others_take_all, others_take_all, False, Outcome.OVER_BUDGET),
        (others_take_all, others_take_all_and_it_runs_out, True, Outcome.OOM),
    ],
    ids=["none", "moved once", "moves on and on", "spilled", "took the room"],
)
def test_other_processes_on_the_device(
    shared_device: Any, before: Any, amid: Any, contended: bool, outcome: Outcome
) -> None:
    shared_device.at(10 + OTHERS_DO.index(before))
    measurement = shared_device.at(10 + OTHERS_DO.index(amid))
    assert measurement.outcome is outcome
    assert measurement.contended is contended


def exclusive(device: Any) -> Device:
    device.exclusive_key = f"test-{os.getsid(os.getppid())}"  # the same in all workers
    return device


def test_a_second_search_on_one_device_is_refused(open_probing: Any) -> None:
    first = open_probing(FaultyModel(), tamper=exclusive)
    first.prober.renew()  # no worker is there now, and the device is still the first search's
    with pytest.raises(DeviceUnavailable, match="search"):
        open_probing(FaultyModel(), tamper=exclusive)
    first.prober.close()
    assert open_probing(FaultyModel(), tamper=exclusive).at(NO_FAULT).ok


# -- Workers that do not get far


@pytest.mark.parametrize(
    ("ended_by", "kills", "outcome"),
    [
        (signal.SIGKILL, 0, Outcome.CRASHED),
        (signal.SIGKILL, 1, Outcome.HOST_OOM),
        (signal.SIGKILL, None, Outcome.HOST_OOM),
        (signal.SIGSEGV, 1, Outcome.CRASHED),
    ],
)
def test_a_kill_by_the_kernel_is_host_memory(
    ended_by: signal.Signals, kills: int | None, outcome: Outcome
) -> None:
    """The kernel cannot be made to kill in a test; its counter can have moved."""
    before = None if kills is None else (oom_kills() or 0) - kills
    assert outcome_of_death(-ended_by, before) is outcome


def test_a_worker_that_cannot_start_says_why(
    open_probing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(WorkerFailed, match="/nonexistent/python"):
        open_probing(FaultyModel())


def test_a_worker_that_dies_in_the_survey_says_how(open_probing: Any) -> None:
    with pytest.raises(WorkerFailed, match=r"\b7\b"):
        open_probing(lambda: os._exit(7)).prober.survey()


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
