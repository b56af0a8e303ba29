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
from autofit.probing.executor_channel import MOST_COPIES, ExecutorChannel
from autofit.probing.prober import Target, open_prober
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

BUDGET = 64 * 2**20
HOPELESS: Any = {"incumbent_samples_per_second": 1e12}
"""A rate that no plan beats: probes are as short as can be."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def _criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy; a larger batch than any real one makes it fail."""
    print("user code may print", len(output))
    if len(output) == 77:
        raise LookupError("sample 7 is broken")
    return nn.functional.cross_entropy(output, target)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: Any = [{"params": trained[:2], "lr": 0.1}, {"params": trained[2:]}]
    return torch.optim.AdamW(groups)


class Live:
    """A training in progress and its prober."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = _adam(self.model)
        for _ in range(2):
            self.model(torch.randn(4, 6)).sum().backward()
            self.optimizer.step()
        self.batch = (torch.randn(4, 6), torch.randint(0, 4, (4,)))
        self.workload = Workload(
            self.model,
            self.batch,
            criterion=_criterion,
            optimizer=self.optimizer,
            global_batch=12,
        )
        self.before = self.digest()
        self.prober = open_prober(self.workload, load_strategies(None), Target("cpu", BUDGET))

    def probe(self, micro_batch: int, **more: Any) -> Any:
        """Probe that micro-batch."""
        return self.prober.probe(ProbeRequest(ResolvedPlan(Plan(micro_batch)), **more))

    def digest(self) -> dict[str, str]:
        objects = {"model": self.model, "optimizer": self.optimizer, "batch": self.batch}
        facts = digest(objects)
        return {name: fact for name, fact in facts.items() if name.startswith(tuple(objects))}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    opened = Live()
    yield opened
    opened.prober.close()


@pytest.fixture(autouse=True)
def _untouched(live: Live) -> Iterator[None]:
    yield
    assert differences(live.before, live.digest()) == []


def test_the_optimizers_state_is_part_of_what_a_plan_holds(live: Live) -> None:
    """What is there before the first step must count as what a first step makes."""
    fresh = Workload(live.model, live.batch, criterion=_criterion, optimizer=_adam(live.model))
    with open_prober(fresh, target=Target("cpu", BUDGET)) as prober:
        probed: Any = prober.probe(ProbeRequest(ResolvedPlan(Plan(4)), **HOPELESS))
    made = probed.measurement.peak_allocated_bytes
    brought = live.probe(4, **HOPELESS).measurement.peak_allocated_bytes
    # On the CPU, step counts that a first step makes count too; those that are brought do not.
    counts = len(live.optimizer.state)
    assert made - brought == 512 * counts


def test_the_users_error_begins_with_what_was_tried(live: Live) -> None:
    raised = live.probe(77).user_exception
    said = "".join(traceback.format_exception(raised))
    before, found, _ = said.partition("Traceback (most recent call last)")
    assert found
    assert "autofit was probing 77 x 1" in before


def test_closing_ends_the_worker_and_removes_the_payload(
    live: Live, running: Callable[[int], bool]
) -> None:
    assert live.probe(4, **HOPELESS).measurement.ok
    prober: Any = live.prober
    channel, worker = prober._channel, prober.worker_pid
    assert channel.payload.exists()
    live.prober.close()
    assert not channel.payload.exists()
    assert not running(worker)
    live.prober.close()


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


def test_a_worker_computes_as_its_parent_does() -> None:
    """A model built under another default dtype, or with TF32 allowed, is measured with them."""

    def build() -> nn.Module:
        assert torch.get_num_threads() == threads
        assert torch.get_float32_matmul_precision() == "medium"
        return nn.Linear(4, 2)  # of the default dtype, as the batch is

    before = torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        workload = Workload(build, torch.randn(3, 4))
        with open_prober(workload, target=Target("cpu", BUDGET)) as prober:
            probed = prober.probe(ProbeRequest(ResolvedPlan(Plan(3)), **HOPELESS))
            assert probed.measurement.outcome is Outcome.OK
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(before)


def _can_flush_denormals() -> bool:
    can = torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    return can


@pytest.mark.skipif(not _can_flush_denormals(), reason="not possible on this processor")
def test_a_probe_on_a_processor_computes_without_denormal_numbers() -> None:
    """A training that begins with them would be timed at a fraction of its later speed."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        denormal = torch.full((2**20,), 1e-39) * 0.5  # enough for every thread
        assert not denormal.any()
        return model(batch).sum()

    with open_prober(
        Workload(nn.Linear(4, 2), torch.randn(3, 4), loss_fn=loss), target=Target("cpu", BUDGET)
    ) as prober:
        probed = prober.probe(ProbeRequest(ResolvedPlan(Plan(3)), **HOPELESS))
    assert probed.measurement.outcome is Outcome.OK, probed.measurement.detail
    assert (torch.full((), 1e-39) * 0.5).item() > 0  # the caller's process is left as it was


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
    channel = WorkerChannel(Workload(model, torch.ones(2, 2)), device="cpu")
    try:
        with ThreadPoolExecutor(1) as thread:
            opening = thread.submit(channel.open)
            while channel.pid is None:
                time.sleep(0.01)
            channel.drop()
            with pytest.raises(WorkerFailed):
                opening.result()
        assert channel.pid is None
        assert channel.open().total_bytes
    finally:
        channel.close()


# -- How a worker process starts, is asked and ends.

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


# -- Workers wherever a search may be called from: what they take over, and what they leave alone.

SEARCH = """
    import sys
    import torch
    import autofit

    with open("runs", "a") as runs:
        print("the file ran", file=runs)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, inputs):
            print("a line of the user's", file=sys.stderr)
            return self.layer(inputs)

    def search():
        report = autofit.search(
            Net(), torch.randn(4, 8), loss_fn=lambda model, batch: model(batch).square().mean(),
            device="cpu", vram_budget="16MiB", max_probes=2, strategies=[], progress=False)
        report.save("report.json")
"""
AT_ONCE = textwrap.dedent(SEARCH) + "search()\n"


def ran(folder: Path, *command: str, **variables: str) -> str:
    """Run a program that searches at once; return what it printed."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "report.json").exists()
    assert (folder / "runs").read_text() == "the file ran\n"
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(AT_ONCE)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("command", [["train.py"], ["-m", "train"], ["-c", AT_ONCE]])
def test_a_file_without_a_guard_runs_once(folder: Path, command: list[str]) -> None:
    """Its classes go to the worker by value, however Python was given it."""
    assert "a line of the user's" not in ran(folder, sys.executable, *command)


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_search_with_closed_standard_streams(folder: Path, closed: str) -> None:
    ran(folder, "bash", "-c", f'"$@" {closed}', "-", sys.executable, "train.py")


@pytest.mark.slow
def test_a_search_in_a_program_that_embeds_python(folder: Path) -> None:
    """It has no name for the program of Python until it is told one."""
    name = sys.executable
    embedding = f"import sys\nsys.executable = ''\nimport autofit\nsys.executable = {name!r}\n"
    ran(folder, sys.executable, "-c", embedding + AT_ONCE)


@pytest.mark.slow
def test_a_search_in_a_notebook(folder: Path) -> None:
    """As its kernel runs cells: in a main module without a file, from a thread's event loop."""
    cell = (
        "import asyncio\n"
        f"async def run(): exec({AT_ONCE!r}, globals())\n"
        "asyncio.new_event_loop().run_until_complete(run())\n"
    )
    ran(folder, sys.executable, "-c", cell)


def make_workload() -> Workload:
    return Workload(nn.Linear(4, 4), torch.randn(8, 4), loss_fn=lambda m, b: m(b).square().mean())


def asked(function: Callable[[Any], Any]) -> Any:
    """What a function returns in a fresh worker."""
    with open_prober(make_workload(), target=Target("cpu")) as prober:
        return prober.run(function)


def disables_the_compiler(session: Any) -> bool:
    import torch._dynamo

    return bool(torch._dynamo.config.disable)


def test_variables_that_torch_reads_as_it_is_imported_are_those_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not asked(disables_the_compiler)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert asked(disables_the_compiler)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    assert not asked(disables_the_compiler)


def surroundings(session: Any) -> Any:
    return os.environ.get("MINE"), os.getcwd(), sys.argv, "/no/such/folder" in sys.path


def test_a_worker_sees_variables_folder_and_path_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(surroundings)
    monkeypatch.setenv("MINE", "set since a worker was started")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/no/such/folder")
    expected = "set since a worker was started", str(tmp_path), sys.argv[:1], True
    assert asked(surroundings) == expected


def test_a_folder_that_was_removed_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert asked(disables_the_compiler) is False


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads that hold a lock of Python's own and compute: a fork of this process would hang."""
    over, held = threading.Event(), threading.Event()

    def hold() -> None:
        with logging._lock:  # type: ignore[attr-defined]  # a fork takes it, too
            held.set()
            over.wait(1.0)
        while not over.is_set():
            torch.ones(64, 64) @ torch.ones(64, 64)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    held.wait()
    yield
    over.set()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("busy_threads")
def test_threads_of_the_caller_do_not_matter() -> None:
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(asked(disables_the_compiler)))
    asking.start()
    asking.join()
    assert answers == [False]


def probe_there(results: Any) -> None:
    """In another process: probe a plan, and say how it ended."""
    with open_prober(make_workload(), target=Target("cpu")) as prober:
        results.put(prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.outcome)


@pytest.mark.slow
def test_a_daemon_may_search() -> None:
    """As workers of Dask and of a `multiprocessing.Pool` are: they may start no processes of it."""
    processes = multiprocessing.get_context("spawn")
    results = processes.SimpleQueue()
    process = processes.Process(target=probe_there, args=(results,), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert results.get() is Outcome.OK


def test_a_fork_of_the_caller_has_a_worker_of_its_own_and_leaves_the_callers_alone() -> None:
    with open_prober(make_workload(), target=Target("cpu")) as prober:
        results = multiprocessing.get_context("fork").SimpleQueue()
        worker = prober.worker_pid
        child = multiprocessing.get_context("fork").Process(target=probe_there, args=(results,))
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
        from tests.probing.test_worker_surroundings import probe_there
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


def test_a_worker_gets_processors_as_its_owner_does_and_no_signals_of_its_terminal() -> None:
    """Linux shares processors among sessions, and a terminal signals a process group."""
    with open_prober(Workload(nn.Linear(8, 4), torch.randn(4, 8)), (), Target("cpu")) as prober:
        worker = prober.worker_pid
        assert worker is not None
        assert os.getsid(worker) == os.getsid(0)
        assert os.getpgid(worker) != os.getpgid(0)


# -- A channel to an executor that loses answers, or whose owner no longer wants them.


def _called(session: Any) -> int:
    return 7


CALL = Call(_called, vram_budget_bytes=2**20)


class _Losing(Executor):
    """An executor that never answers its first requests, and answers the others with 7."""

    def __init__(self, lost: float) -> None:
        self.lost, self.submitted = lost, list[Future[Any]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if len(self.submitted) >= self.lost:
            future.set_result(message_of_reply(Reply(7)))
        self.submitted.append(future)
        return future


def _channel(executor: Executor) -> ExecutorChannel:
    model = torch.nn.Linear(2, 2)
    return ExecutorChannel(executor, Workload(model, torch.ones(4, 2), loss_fn=lambda m, b: m(b)))


def test_a_request_whose_answer_is_lost_is_submitted_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(executor_channel, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(executor_channel, "_SLACK_S", 0.0)
    executor = _Losing(2)
    deadline = Deadline.after(0.1, ends_at=time.monotonic() + 60)
    assert _channel(executor).call(CALL, deadline, ignore_stage).value == 7
    assert [future.cancelled() for future in executor.submitted] == [True, True, False]


def test_an_executor_that_never_answers_is_asked_a_few_times(monkeypatch: Any) -> None:
    monkeypatch.setattr(executor_channel, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(executor_channel, "_SLACK_S", 0.0)
    executor = _Losing(math.inf)
    with pytest.raises(WorkerFailed, match="executor"):
        _channel(executor).call(CALL, Deadline.after(0.01), ignore_stage)
    assert len(executor.submitted) == MOST_COPIES
    assert all(future.cancelled() for future in executor.submitted)


def test_a_late_answer_counts_where_the_request_was_submitted_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(executor_channel, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(executor_channel, "_SLACK_S", 0.0)
    executor = _Losing(math.inf)
    deadline = Deadline.after(1.0, ends_at=time.monotonic() + 60)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(_channel(executor).call, CALL, deadline, ignore_stage)
        while len(executor.submitted) < 2:
            time.sleep(0.01)
        executor.submitted[0].set_result(message_of_reply(Reply(5)))
        assert asked.result().value == 5


def test_a_request_that_another_thread_drops_is_not_submitted_again() -> None:
    executor = _Losing(math.inf)
    channel = _channel(executor)
    deadline = Deadline.after(60, ends_at=time.monotonic() + 5)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(channel.call, CALL, deadline, ignore_stage)
        while not executor.submitted:
            time.sleep(0.01)
        channel.drop()
        with pytest.raises(NoReply):
            asked.result()
    assert len(executor.submitted) == 1
