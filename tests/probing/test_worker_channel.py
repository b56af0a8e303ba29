"""A search's view of its worker: it answers, and nothing of the user's is touched."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument, WorkerFailed
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing import executor_channel, worker_channel
from autofit.probing.executor_channel import MAX_COPIES, ExecutorChannel
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import (
    Call,
    Deadline,
    NoReply,
    ProbeRequest,
    Reply,
    Workplace,
    ignore_stage,
)
from autofit.probing.wire import message_of_reply
from autofit.probing.worker_channel import WorkerChannel, WorkerProcess, words_of_death
from autofit.registry import load_strategies
from autofit.testing.digest import differences, digest
from autofit.training.workload import Workload
from autofit.units import format_bytes

CPU = Target("cpu", "64MiB")
HOPELESS: Any = {"incumbent_samples_per_second": 1e12}
"""A rate that no plan beats: probes are as short as can be."""


def probed(prober: Prober, micro_batch: int = 4) -> Any:
    return prober.probe(ProbeRequest(ResolvedPlan(Plan(micro_batch)), **HOPELESS))


def _criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy; a larger batch than any real one makes it fail."""
    print("user code may print", len(output))
    if len(output) == 77:
        raise LookupError("sample 7 is broken")
    return nn.functional.cross_entropy(output, target)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    weight, *others = model.parameters()
    groups: Any = [{"params": [weight], "lr": 0.1}, {"params": others}]
    return torch.optim.AdamW(groups)


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[Workload, Prober]]:
    """A training in progress, which no test may touch, and its prober."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    optimizer, batch = _adam(model), (torch.randn(4, 6), torch.randint(0, 4, (4,)))
    for _ in range(2):
        model(batch[0]).sum().backward()
        optimizer.step()
    objects = {"model": model, "optimizer": optimizer, "batch": batch}
    before = digest(objects)
    workload = Workload(model, batch, criterion=_criterion, optimizer=optimizer, global_batch=12)
    with open_prober(workload, load_strategies(None), CPU) as prober:
        yield workload, prober
    changed = differences(before, digest(objects))
    assert not any(each.startswith(tuple(objects)) for each in changed)


def test_the_optimizers_state_is_part_of_what_a_plan_holds(live: tuple[Any, Prober]) -> None:
    """What is there before the first step must count as what a first step makes."""
    workload, prober = live
    fresh = replace(workload, optimizer=_adam(workload.model), global_batch=None)
    with open_prober(fresh, target=CPU) as other:
        made, brought = (probed(each).measurement.peak_allocated_bytes for each in (other, prober))
    # On the CPU, step counts that a first step makes count too; those that are brought do not.
    assert made - brought == 512 * len(workload.optimizer.state)


def test_the_users_error_begins_with_what_was_tried(live: tuple[Any, Prober]) -> None:
    said = "".join(traceback.format_exception(probed(live[1], 77).user_exception))
    before, found, _ = said.partition("Traceback (most recent call last)")
    assert found
    assert "autofit was probing 77 x 1" in before


def test_closing_ends_the_worker_and_removes_the_payload(
    live: tuple[Any, Any], running: Callable[[int], bool]
) -> None:
    prober = live[1]
    assert probed(prober).measurement.ok
    channel, worker = prober._channel, prober.worker_pid
    assert channel.payload.exists()
    prober.close()
    assert not channel.payload.exists()
    assert not running(worker)


def test_what_cannot_be_opened_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model: Any = nn.Linear(6, 4)
    with pytest.raises(InvalidArgument, match="device"):
        open_prober(Workload(model, torch.randn(4, 6)), target=Target("cpu", "1000TiB"))
    model.thing = (n for n in range(3))
    with pytest.raises(InvalidArgument, match="function"):
        open_prober(Workload(model, torch.randn(4, 6)), target=Target("cpu"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def computing_otherwise() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("computing_otherwise")
def test_a_worker_computes_as_its_parent_does_but_without_denormal_numbers() -> None:
    """A training that begins with these would be timed at a fraction of its later speed."""
    threads = torch.get_num_threads()
    can_flush = torch.set_flush_denormal(True)  # not on every processor
    torch.set_flush_denormal(False)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == threads
        assert torch.get_float32_matmul_precision() == "medium"
        denormal = torch.full((2**20,), 1e-309) * 0.5  # enough for every thread
        assert not denormal.any() or not can_flush
        return model(batch).sum()  # of the default dtype, as the batch is

    workload = Workload(lambda: nn.Linear(4, 2), torch.randn(3, 4), loss_fn=loss)
    with open_prober(workload, target=CPU) as prober:
        measured = probed(prober, 3).measurement
    assert measured.outcome is Outcome.OK, measured.detail
    assert (torch.full((), 1e-309) * 0.5).item() > 0  # the caller's process is left as it was


@pytest.mark.cuda
def test_what_the_caller_holds_on_the_gpu_is_named_with_the_way_to_free_it() -> None:
    model = nn.Linear(1024, 1024).cuda()
    with open_prober(Workload(model, torch.randn(4, 1024)), target=Target("cuda")) as prober:
        survey = prober.survey()
    held = sum(4 * p.numel() for p in model.parameters())
    assert format_bytes(held) in survey.notes[-1]
    assert "model.cpu()" in survey.notes[-1]


class _ReadSlowly:
    """Takes a second to be read."""

    def __reduce__(self) -> Any:
        return time.sleep, (1.0,)


def test_a_worker_that_another_thread_ends_while_it_starts_is_not_replaced() -> None:
    """As Ctrl-C ends what runs at several places."""
    model = nn.Linear(2, 2)
    vars(model)["slow"] = _ReadSlowly()
    with (
        closing(WorkerChannel(Workload(model, torch.ones(2, 2)), device="cpu")) as channel,
        ThreadPoolExecutor(1) as thread,
    ):
        opening = thread.submit(channel.open)
        while channel.pid is None:
            time.sleep(0.01)
        channel.drop()
        with pytest.raises(WorkerFailed):
            opening.result()
        assert channel.pid is None
        assert channel.open().total_bytes


# -- How a worker process starts, is asked and ends

OPENS = """
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
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for planted in (
        "here/json",
        "here/sys",
        "here/types",
        "variable/sitecustomize",
        f".local/{packages}/usercustomize",
    ):
        file = tmp_path / f"{planted}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"open({str(tmp_path / 'run')!r}, 'a').write({planted!r})")
    (tmp_path / "opens.py").write_text(OPENS)
    done = subprocess.run(
        [sys.executable, "-E", "-s", tmp_path / "opens.py"],
        cwd=tmp_path / "here",
        env=os.environ | {"PYTHONPATH": str(tmp_path / "variable"), "HOME": str(tmp_path)},
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


def _lost(channel: WorkerChannel, function: Any, seconds: float = 200.0) -> NoReply:
    """What is said of a worker that is lost while it runs a function."""
    channel.open()
    with pytest.raises(NoReply) as lost:
        channel.call(Call(function, 2**30), Deadline.after(seconds), ignore_stage)
    return lost.value


def _write(session: Workplace, *, hangs: bool) -> None:
    """Write to the worker's connection, as code does that writes to every descriptor."""
    wire = vars(session)["on_stage"].__self__
    os.write(wire.fileno(), b"\0\0\0\x20what is no message")
    if hangs:
        time.sleep(1e6)


@pytest.mark.parametrize("hangs", [True, False])
def test_what_user_code_writes_to_the_connection_is_not_waited_for(
    channel: WorkerChannel, hangs: bool
) -> None:
    lost = _lost(channel, partial(_write, hangs=hangs), 2.0 if hangs else 200.0)
    assert lost.outcome is (Outcome.TIMEOUT if hangs else Outcome.CRASHED)


def _die_after_a_profile(session: Workplace) -> None:
    with torch.profiler.profile(acc_events=True):  # else torch 2.11 warns of its default
        torch.ones(2).sum()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_profiler_leaves_no_last_words(
    channel: WorkerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    assert "printed" not in _lost(channel, _die_after_a_profile).detail


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids of workers that are started meanwhile."""
    pids: list[int] = []
    told_pid = WorkerProcess._told_pid

    def noted(*given: Any) -> int:
        pids.append(told_pid(*given))
        return pids[-1]

    monkeypatch.setattr(WorkerProcess, "_told_pid", noted)
    return pids


def test_ctrl_c_as_a_worker_starts_leaves_none(
    started: list[int], monkeypatch: pytest.MonkeyPatch, running: Any
) -> None:
    """Its thread holds on to what started it."""

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        WorkerProcess()
    while running(started[0]):
        time.sleep(0.01)


@pytest.mark.parametrize("deaths", [1, 2])
def test_one_death_while_it_starts_is_a_transient_failure(
    channel: WorkerChannel, deaths: int, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kernel short of memory kills a process: really killed, before it has opened anything."""

    class Killed(WorkerProcess):
        def __init__(self, deadline: Deadline) -> None:
            super().__init__(deadline)
            if len(started) <= deaths:
                os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(worker_channel, "WorkerProcess", Killed)
    with nullcontext() if deaths == 1 else pytest.raises(WorkerFailed, match="SIGKILL"):
        assert channel.open().total_bytes


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


# -- Wherever a search may be called from: what workers take over, and what they leave alone

AT_ONCE = """
import sys
import torch
import autofit

with open("runs", "a") as runs:
    print("the file ran", file=runs)

class Net(torch.nn.Linear):
    def forward(self, inputs):
        print("a line of the user's", file=sys.stderr)
        return super().forward(inputs)

report = autofit.search(
    Net(8, 4), torch.randn(4, 8), loss_fn=lambda model, batch: model(batch).square().mean(),
    device="cpu", vram_budget="16MiB", max_probes=2, strategies=[], progress=False)
report.save("report.json")
"""
EMBEDDED = f"""
import sys
name, sys.executable = sys.executable, ""
import autofit
sys.executable = name
{AT_ONCE}"""
"""As in a program that embeds Python, and has no name for Python's until it is told one."""
NOTEBOOK = f"""
import asyncio
async def run(): exec({AT_ONCE!r}, globals())
asyncio.new_event_loop().run_until_complete(run())
"""
"""As a kernel runs cells: in a main module without a file, from a thread's event loop."""
HERE = sys.executable
CALLS = {
    "file": [HERE, "train.py"],
    "module": [HERE, "-m", "train"],
    "code": [HERE, "-c", AT_ONCE],
    "embedded": [HERE, "-c", EMBEDDED],
    "notebook": [HERE, "-c", NOTEBOOK],
    **{
        closed: ["bash", "-c", f'"$@" {closed}', "-", HERE, "train.py"]
        for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_program_without_a_guard_searches_and_runs_once(tmp_path: Path, call: str) -> None:
    """Its classes go to the worker by value, and what they print does not come back."""
    (tmp_path / "train.py").write_text(AT_ONCE)
    done = subprocess.run(CALLS[call], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.json").exists()
    assert (tmp_path / "runs").read_text() == "the file ran\n"
    assert "a line of the user's" not in done.stdout + done.stderr


def make_workload() -> Workload:
    return Workload(nn.Linear(4, 4), torch.randn(8, 4), loss_fn=lambda m, b: m(b).square().mean())


def asked(function: Callable[[Any], Any]) -> Any:
    """What a function returns in a fresh worker."""
    with open_prober(make_workload(), target=Target("cpu")) as prober:
        return prober.run(function)


def surroundings(session: Any) -> Any:
    import torch._dynamo

    is_disabled = bool(torch._dynamo.config.disable)
    return is_disabled, os.environ.get("MINE"), os.getcwd(), sys.argv, "/no/such" in sys.path


def test_a_worker_sees_variables_folder_and_path_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that torch reads as it is imported among them."""
    assert asked(surroundings) == (False, None, os.getcwd(), sys.argv[:1], False)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("MINE", "set since a worker was started")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/no/such")
    expected = True, "set since a worker was started", str(tmp_path), sys.argv[:1], True
    assert asked(surroundings) == expected
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    assert not asked(surroundings)[0]


def test_a_folder_that_was_removed_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANOTHER", "environment, for whose server torch is imported there")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert asked(lambda session: "it answers") == "it answers"


def test_threads_of_the_caller_do_not_matter() -> None:
    """They hold a lock of Python's own and compute: a fork of this process would hang."""
    over, held = threading.Event(), threading.Event()

    def hold() -> None:
        with logging._lock:  # type: ignore[attr-defined]  # a fork takes it, too
            held.set()
            over.wait(1.0)
        while not over.is_set():
            torch.ones(64, 64) @ torch.ones(64, 64)

    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            threads.submit(hold)
        held.wait()
        try:
            assert threads.submit(asked, lambda session: "it answers").result() == "it answers"
        finally:
            over.set()


def probe_there(results: Any) -> None:
    """In another process: probe a plan, and say how it ended."""
    with open_prober(make_workload(), target=Target("cpu")) as prober:
        results.put(prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.outcome)


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_a_daemon_has_a_worker_of_its_own_and_leaves_the_callers_alone(method: str) -> None:
    """As workers of Dask and of a `multiprocessing.Pool` are: they may start no processes of it."""
    processes: Any = multiprocessing.get_context(method)
    with open_prober(make_workload(), target=Target("cpu")) as prober:
        results, worker = processes.SimpleQueue(), prober.worker_pid
        child = processes.Process(target=probe_there, args=(results,), daemon=True)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert results.get() is Outcome.OK
        assert prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.ok
        assert prober.worker_pid == worker


@pytest.mark.slow
@pytest.mark.parametrize("ignores", [False, True])
def test_the_users_own_server_of_multiprocessing_is_left_as_it_is(ignores: bool) -> None:
    code = f"""
        import multiprocessing, multiprocessing.forkserver as theirs, signal, torch
        from tests.probing.test_worker_channel import probe_there
        if {ignores}:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        before = dict(vars(theirs._forkserver)), multiprocessing.get_start_method(allow_none=True)
        results = multiprocessing.SimpleQueue()
        probe_there(results)
        after = dict(vars(theirs._forkserver)), multiprocessing.get_start_method(allow_none=True)
        print(results.get(), before[0] == after[0])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["ok", "True"], done.stderr


def test_a_worker_gets_processors_as_its_owner_does_and_no_signals_of_its_terminal(
    channel: Any,
) -> None:
    """Linux shares processors among sessions, and a terminal signals a process group."""
    channel.open()
    assert os.getsid(channel.pid) == os.getsid(0)
    assert os.getpgid(channel.pid) != os.getpgid(0)


# -- A channel to an executor that loses answers, or whose owner no longer wants them


class _Losing(Executor):
    """An executor that never answers its first requests, and answers the others with 7."""

    def __init__(self, lost: float = math.inf) -> None:
        self.lost, self.submitted = lost, list[Future[Any]]()
        self.channel = ExecutorChannel(self, make_workload())

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if len(self.submitted) >= self.lost:
            future.set_result(message_of_reply(Reply(7)))
        self.submitted.append(future)
        return future

    def asked(self, seconds: float, ends_in: float = math.inf) -> Any:
        """Ask for a number within so many seconds, and all in all."""
        deadline = Deadline.after(seconds, ends_at=time.monotonic() + ends_in)
        call = Call(lambda session: 7, vram_budget_bytes=2**20)
        return self.channel.call(call, deadline, ignore_stage).value


@pytest.fixture
def _without_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_channel, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(executor_channel, "_SLACK_S", 0.0)


@pytest.mark.usefixtures("_without_slack")
def test_a_request_whose_answer_is_lost_is_submitted_again() -> None:
    executor = _Losing(2)
    assert executor.asked(0.1, ends_in=60) == 7
    assert [future.cancelled() for future in executor.submitted] == [True, True, False]


@pytest.mark.usefixtures("_without_slack")
def test_an_executor_that_never_answers_is_asked_a_few_times() -> None:
    executor = _Losing()
    with pytest.raises(WorkerFailed, match="executor"):
        executor.asked(0.01)
    assert len(executor.submitted) == MAX_COPIES
    assert all(future.cancelled() for future in executor.submitted)


@pytest.mark.usefixtures("_without_slack")
def test_a_late_answer_counts_where_the_request_was_submitted_again() -> None:
    class Late(_Losing):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(fn, *args, **kwargs)
            if len(self.submitted) == 2:
                self.submitted[0].set_result(message_of_reply(Reply(5)))
            return future

    assert Late().asked(0.1, ends_in=60) == 5


def test_a_request_that_another_thread_drops_is_not_submitted_again() -> None:
    executor = _Losing()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(executor.asked, 60, 60)
        while not executor.submitted:
            time.sleep(0.01)
        executor.channel.drop()
        with pytest.raises(NoReply):
            asked.result()
    assert len(executor.submitted) == 1
