"""How a worker process starts, is asked and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import WorkerFailed
from autofit.measurement import Outcome
from autofit.probing import worker_channel
from autofit.probing.requests import Call, Deadline, NoReply, Workplace, ignore_stage
from autofit.probing.worker_channel import WorkerChannel, WorkerProcess, words_of_death
from autofit.training.workload import Workload

OPENS = """
    import os, sys
    import torch
    from autofit.probing.worker_channel import WorkerChannel
    from autofit.training.workload import Workload
    channel = WorkerChannel(Workload(torch.nn.Linear(2, 2), torch.ones(2, 2)), device="cpu")
    channel.open()
    channel.close()
"""


@pytest.mark.slow
def test_no_code_runs_but_what_its_parent_imports(tmp_path: Path) -> None:
    """None of the current directory, nor of where -E and -s keep the parent from looking.

    A worker replaces its path at once, and what it imports until then is Python's own.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    of_the_user = tmp_path / ".local" / "lib" / version / "site-packages"
    planted = {
        tmp_path / "here": ("json", "sys", "types"),
        tmp_path / "variable": ("sitecustomize",),
        of_the_user: ("usercustomize",),
    }
    for folder, names in planted.items():
        folder.mkdir(parents=True)
        for name in names:
            code = f"open({str(tmp_path / 'run')!r}, 'a').write({name!r})"
            (folder / f"{name}.py").write_text(code)
    script = tmp_path / "opens.py"
    script.write_text(textwrap.dedent(OPENS))
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "variable"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-E", "-s", script],
        cwd=tmp_path / "here",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run").exists()


def test_a_request_to_a_worker_that_does_not_read_obeys_its_deadline() -> None:
    worker = WorkerProcess()
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(NoReply) as lost:
        worker.ask(b"x" * 2**20, Deadline.after(1.0))  # more than a socket holds
    assert lost.value.outcome is Outcome.TIMEOUT


def _write(session: Workplace, *, hangs: bool) -> None:
    """Write to the worker's connection, as code does that writes to every descriptor."""
    wire = vars(session)["on_stage"].__self__
    os.write(wire.fileno(), b"\0\0\0\x20what is no message")
    if hangs:
        time.sleep(1e6)


@pytest.mark.parametrize("hangs", [True, False])
def test_what_user_code_writes_to_the_connection_is_not_waited_for(hangs: bool) -> None:
    channel = WorkerChannel(make_workload(), device="cpu")
    try:
        channel.open()
        call = Call(partial(_write, hangs=hangs), 2**30)
        with pytest.raises(NoReply) as lost:
            channel.call(call, Deadline.after(2.0 if hangs else 200.0), ignore_stage)
    finally:
        channel.close()
    assert lost.value.outcome is (Outcome.TIMEOUT if hangs else Outcome.CRASHED)


def _die_after_a_profile(session: Workplace) -> None:
    with torch.profiler.profile(acc_events=True):  # else torch 2.11 warns of its default
        torch.ones(2).sum()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_profiler_leaves_no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    channel = WorkerChannel(make_workload(), device="cpu")
    try:
        channel.open()
        with pytest.raises(NoReply) as lost:
            channel.call(Call(_die_after_a_profile, 2**30), Deadline.after(200.0), ignore_stage)
    finally:
        channel.close()
    assert "printed" not in lost.value.detail


def test_ctrl_c_as_a_worker_starts_leaves_none(
    monkeypatch: pytest.MonkeyPatch, running: Any
) -> None:
    """Its thread holds on to what started it."""
    started: list[int] = []
    told_pid = WorkerProcess._told_pid

    def noted(*given: Any) -> int:
        started.append(told_pid(*given))
        return started[-1]

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr(WorkerProcess, "_told_pid", noted)
    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        WorkerProcess()
    while running(started[0]):
        pass


@pytest.mark.parametrize("executable", [None, ""])
def test_a_python_without_a_program_is_said(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(WorkerFailed, match=r"sys\.executable"):
        WorkerProcess()


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert "signal 40" in words_of_death(-40, "")
    assert "SIGKILL" in words_of_death(-signal.SIGKILL, "")


def make_workload() -> Workload:
    return Workload(nn.Linear(4, 4), torch.randn(8, 4), loss_fn=lambda m, b: m(b).square().mean())


@pytest.mark.parametrize("deaths", [1, 2])
def test_one_death_while_it_starts_is_a_transient_failure(
    deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kernel short of memory kills a process: really killed, before it has opened anything."""
    started: list[int] = []

    class Killed(WorkerProcess):
        def __init__(self, deadline: Deadline) -> None:
            super().__init__(deadline)
            started.append(self.pid)
            if len(started) <= deaths:
                os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(worker_channel, "WorkerProcess", Killed)
    channel = WorkerChannel(make_workload(), device="cpu")
    try:
        if deaths == 1:
            assert channel.open().total_bytes
        else:
            with pytest.raises(WorkerFailed, match="SIGKILL"):
                channel.open()
    finally:
        channel.close()


@pytest.mark.slow
def test_a_process_group_that_torchrun_did_not_start_is_refused(tmp_path: Path) -> None:
    """Each of its ranks would search by itself, all at once."""
    program = textwrap.dedent(f"""
        import sys
        import torch
        import torch.distributed as dist
        import autofit
        rank = int(sys.argv[1])
        store = dist.FileStore({str(tmp_path / "store")!r}, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        workload = autofit.Workload(torch.nn.Linear(2, 2), torch.ones(2, 2))
        try:
            autofit.probe(workload, device="cpu")
        except autofit.InvalidArgument as refused:
            print(refused)
        dist.destroy_process_group()
    """)
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, rank], stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    for number, rank in enumerate(ranks):
        said, _ = rank.communicate(timeout=200)
        assert f"rank {number} of a process group of 2" in said
