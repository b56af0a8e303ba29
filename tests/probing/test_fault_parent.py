"""The parent is killed or interrupted: no worker is left, and nothing of the user's has changed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

SECONDS_TO_WAIT = 120.0  # far below the time that workers hang for

PROGRAM = Path(__file__).parents[1] / "workloads" / "hanging.py"


@pytest.fixture
def hangs(tmp_path: Path) -> Path:
    """A file that is there once a worker hangs."""
    return tmp_path / "hangs"


@pytest.fixture
def start(
    hangs: Path, python: Callable[..., subprocess.Popen[str]]
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the program as a process of its own; in the end, kill what is left of it."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        process = python(
            PROGRAM,
            *arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"HANGS": str(hangs)},
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS_TO_WAIT)


def read_until(stream: IO[str] | None, words: str) -> None:
    assert stream is not None
    lines = []
    for line in stream:
        lines.append(line)
        if words in line:
            return
    raise AssertionError(f"{words!r} was never printed, but:\n{''.join(lines)}")


def worker_of(pid: int) -> int:
    """The process id of its child that has a worker's mark."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (worker,) = [int(child) for child in children if _is_marked(child)]
    return worker


def _is_marked(pid: str) -> bool:
    mark = re.search(rb"AUTOFIT_WORKER=(\w+)", Path(f"/proc/{pid}/environ").read_bytes())
    return mark is not None and set(mark[1]) != {ord("0")}


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + SECONDS_TO_WAIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    ("arguments", "forks_workers"),
    [
        (["start"], False),
        (["probe", "sleep"], True),
        (["probe", "hold_the_interpreter"], True),
        (["probe", "refuse_the_death_signal"], True),
    ],
    ids=["starting", "asleep", "interpreter locked", "by the pipe alone"],
)
def test_a_parent_that_is_killed_leaves_no_worker_and_no_file(
    start: Any,
    running: Callable[[int], bool],
    arguments: list[str],
    forks_workers: bool,
    hangs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    parent = start(*arguments, forks_workers=forks_workers)
    read_until(parent.stdout, "ready")
    worker = worker_of(parent.pid)
    assert arguments == ["start"] or wait_for(hangs.exists)
    assert running(worker)
    parent.kill()
    assert wait_for(lambda: not running(worker))
    assert list(tmp_path.glob("autofit*")) == []  # torch keeps a cache there, too


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_search_and_leaves_nothing(
    start: Any, running: Callable[[int], bool], hangs: Path, times: int
) -> None:
    parent = start("search")
    read_until(parent.stdout, "ProbeStarted 1")
    worker = worker_of(parent.pid)
    assert wait_for(hangs.exists)
    for _ in range(times):
        parent.send_signal(signal.SIGINT)
    output = parent.communicate(timeout=SECONDS_TO_WAIT)[0]
    assert "changed: []" in output
    assert "report: interrupted 2" in output or (times == 2 and "interrupted" in output)
    assert not running(worker)
