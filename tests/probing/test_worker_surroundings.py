"""Workers wherever a search may be called from: what they take over, and what they leave alone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.training.workload import Workload

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
