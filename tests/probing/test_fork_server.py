"""Workers come from a server that has imported torch; what becomes of them where it ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from autofit.errors import SearchTimedOut, WorkerFailed
from autofit.probing import fork_server, worker_channel
from autofit.probing.requests import STACK_SIGNAL, Call, Deadline, NoReply, ignore_stage
from autofit.probing.worker_channel import WorkerChannel, WorkerProcess


def parent_of(process: int) -> int:
    """The process id of a process's parent."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def servers() -> set[int]:
    """The processes that this one has started, and that have not ended."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return set(map(int, children.split()))


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that no server has yet."""
    monkeypatch.setenv("ANOTHER", str(time.monotonic_ns()))


@pytest.fixture
def ahead(another: None) -> int:
    """A server of the environment that was started before anyone asked for a worker."""
    before = servers()
    fork_server.start_server()
    fork_server.start_server()
    (started,) = servers() - before
    return started


def worker_and_server(channel: WorkerChannel) -> tuple[int, int]:
    """Open the channel; return the process ids of its worker and of the server that it is of."""
    channel.open()
    worker = channel.pid
    assert worker is not None
    return worker, parent_of(parent_of(worker))


def test_workers_are_forks_of_one_process(channel: WorkerChannel) -> None:
    first, server = worker_and_server(channel)
    channel.drop()
    second, same = worker_and_server(channel)
    assert first != second
    assert server == same != os.getpid()
    assert parent_of(server) == os.getpid()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_server_that_ends_takes_no_worker_along_and_is_replaced_in_the_same_call(
    channel: WorkerChannel, running: Any, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    worker, server = worker_and_server(channel)
    os.kill(server, ending)
    while ending == signal.SIGKILL and running(server):
        time.sleep(0.01)
    assert running(worker)
    channel.drop()
    assert not running(worker)
    if ending == signal.SIGSTOP:
        monkeypatch.setattr(worker_channel, "_FORK_SECONDS", 2.0)
    assert worker_and_server(channel)[1] != server
    assert not Path(f"/proc/{server}").exists()


def test_a_server_that_hangs_takes_no_longer_than_the_search_has(channel: WorkerChannel) -> None:
    _, server = worker_and_server(channel)
    channel.drop()
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(SearchTimedOut):
        channel.open(ends_at=time.monotonic() + 0.2)
    assert worker_and_server(channel)[1] != server
    assert not Path(f"/proc/{server}").exists()


def test_a_worker_whose_supervisor_is_killed_ends_and_is_replaced(
    channel: WorkerChannel, running: Any
) -> None:
    worker, _ = worker_and_server(channel)
    os.kill(parent_of(worker), signal.SIGKILL)
    while running(worker):
        time.sleep(0.01)
    channel.drop()
    assert worker_and_server(channel)[0] != worker


def test_a_worker_takes_at_most_one_thread_here(channel: WorkerChannel) -> None:
    before = threading.active_count()
    for _ in range(2):
        channel.open()
        assert threading.active_count() <= before + 1
        channel.drop()
        assert threading.active_count() == before


@pytest.mark.slow
@pytest.mark.parametrize("limit", [64, 2048])
def test_open_descriptors_may_be_few_or_many(
    channel: WorkerChannel, limit: int, request: pytest.FixtureRequest
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    with ExitStack() as stack:
        for _ in range(limit - 1000):
            stack.enter_context(open(os.devnull))
        channel.open()


@pytest.mark.slow
@pytest.mark.usefixtures("another")
def test_the_ends_of_children_may_be_ignored(
    channel: WorkerChannel, request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGCHLD, before))
    channel.open()


@pytest.mark.usefixtures("another")
def test_signals_may_be_blocked_here(
    channel: WorkerChannel, request: pytest.FixtureRequest
) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, STACK_SIGNAL})
    request.addfinalizer(lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before))
    channel.open()
    with pytest.raises(NoReply, match="exited with 3"):
        channel.call(Call(lambda session: os._exit(3), 2**30), Deadline.after(200.0), ignore_stage)


@pytest.mark.usefixtures("another")  # so that the thread starts the server
def test_a_worker_and_its_server_outlive_the_thread_that_asked_for_them(
    channel: WorkerChannel, running: Any
) -> None:
    thread = threading.Thread(target=channel.open)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0.01)
    worker, server = worker_and_server(channel)
    time.sleep(0.5)  # for the kernel to end what it would end with the thread
    assert running(worker)
    assert running(server)


KEEPS_A_THREAD = "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()"


def test_where_a_fork_would_be_unsafe_there_is_none(
    channel: WorkerChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: Any
) -> None:
    """A fork has but one of its parent's threads, whatever locks the others hold."""
    (tmp_path / "sitecustomize.py").write_text(KEEPS_A_THREAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker, server = worker_and_server(channel)
    programs = [Path(f"/proc/{each}/cmdline").read_bytes() for each in (worker, server)]
    assert programs[0] != programs[1]
    assert len(os.listdir(f"/proc/{worker}/task")) > 1
    channel.drop()
    assert not running(worker)


def test_a_python_that_does_not_start_is_said_in_its_words(
    channel: WorkerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(WorkerFailed, match="encodings"):
        channel.open()


PROGRAM = """
import sys
import torch
from autofit.probing.prober import Target, open_prober
from autofit.training.workload import Workload
with open_prober(Workload(torch.nn.Linear(2, 2), torch.ones(2, 2)), (), Target("cpu")) as prober:
    print(prober.run(lambda session: [bool(sys.flags.dont_write_bytecode), *sys.warnoptions]))
"""


def test_workers_run_their_code_with_the_options_of_this_python() -> None:
    given = ["-B", "-W", "ignore::BytesWarning", "-X", "utf8"]
    ran = subprocess.run(
        [sys.executable, *given, "-c", PROGRAM], capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.strip() == "[True, 'ignore::BytesWarning']", ran.stderr


def test_a_server_that_was_started_ahead_serves_once_torch_has_written_its_own_variable(
    channel: WorkerChannel, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose value the worker has nevertheless: it may be the user's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/a/folder")
    assert worker_and_server(channel)[1] == ahead
    call = Call(lambda session: os.environ["TORCHINDUCTOR_CACHE_DIR"], 2**30)
    reply = channel.call(call, Deadline.after(200.0), ignore_stage)
    assert reply.value_or_raise() == "/a/folder"


def test_a_server_of_surroundings_that_have_changed_since_is_ended(
    channel: WorkerChannel, ahead: int, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    worker, server = worker_and_server(channel)
    assert server != ahead
    assert not running(ahead)
    assert running(worker)


def test_a_server_that_dies_amid_its_imports_is_replaced(
    channel: WorkerChannel, ahead: int, running: Any
) -> None:
    os.kill(ahead, signal.SIGKILL)
    worker, server = worker_and_server(channel)
    assert server != ahead
    assert running(worker)


@pytest.mark.slow
def test_several_workers_that_wait_for_one_server_learn_that_it_died(ahead: int) -> None:
    os.kill(ahead, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(WorkerProcess) for _ in range(4)]
        wait(waiting, 1.0)
        os.kill(ahead, signal.SIGKILL)
    assert {type(each.exception()) for each in waiting} == {NoReply}
