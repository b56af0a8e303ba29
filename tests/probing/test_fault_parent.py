"""The parent is killed or interrupted: no worker is left, and nothing of the user's has changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

SECONDS_A_WORKER_MAY_OUTLIVE_ITS_PARENT = 2.0
SECONDS_TO_WAIT = 60.0

MODEL = """
import ctypes, os, signal, sys, time
import torch
from torch import nn

def says_so(): open(os.environ["HANGS"], "w").close()
def sleeps(): says_so(); time.sleep(600)
def holds_the_interpreter(): says_so(); ctypes.PyDLL(None).sleep(600)
def unties_itself(): ctypes.CDLL(None).prctl(1, 0); sleeps()

class Hangs(nn.Module):
    def __init__(self, way, above):
        super().__init__()
        self.way, self.above, self.layer = way, above, nn.Linear(16, 16)
    def forward(self, inputs):
        if len(inputs) > self.above and "CALM" not in os.environ:
            self.way()
        return self.layer(inputs)
"""

PROBES = """
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Target, open_prober
from autofit.training.workload import Workload

workload = Workload(Hangs({way}, above=1), torch.ones(2, 16))
with open_prober(workload, target=Target("cpu", "64MiB")) as prober:
    print("ready", flush=True)
    prober.probe(ProbeRequest(ResolvedPlan(Plan(2))))
"""

STARTS = """
import autofit.probing.worker_channel
process = autofit.probing.worker_channel.WorkerProcess()
print("ready", flush=True)
time.sleep(600)
"""

SEARCHES = """
import autofit
from autofit.snapshot.snapshot import (differences, digest)

model = Hangs(sleeps, above=2)
torch.manual_seed(3)
before = digest({"model": model})
try:
    report = autofit.search(
        model, torch.ones(2, 16), device="cpu", vram_budget="64MiB", strategies=[],
        progress=lambda event: print(type(event).__name__, event.progress.probes, flush=True),
    )
    print("report:", report.record.search.stopped_because, report.best.plan.micro_batch)
except KeyboardInterrupt:
    print("interrupted")
finally:
    print("changed:", differences(before, digest({"model": model})), flush=True)
"""


@pytest.fixture
def hangs(tmp_path: Path) -> Path:
    """A file that is there once a worker hangs."""
    return tmp_path / "hangs"


@pytest.fixture
def start(hangs: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a script as a process of its own, and kills what is left of it."""
    started: list[subprocess.Popen[str]] = []

    def run(script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", MODEL + script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"HANGS": str(hangs)},
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


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    "script",
    [
        STARTS,
        PROBES.format(way="sleeps"),
        PROBES.format(way="holds_the_interpreter"),
        PROBES.format(way="unties_itself"),
    ],
    ids=["starting", "asleep", "interpreter locked", "by the pipe alone"],
)
def test_a_parent_that_is_killed_leaves_no_worker_and_no_file(
    start: Any,
    running: Callable[[int], bool],
    script: str,
    hangs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    parent = start(script)
    read_until(parent.stdout, "ready")
    (worker,) = children_of(parent.pid)
    assert script is STARTS or wait_for(hangs.exists, SECONDS_TO_WAIT)
    assert running(worker)
    parent.kill()
    assert wait_for(lambda: not running(worker), SECONDS_A_WORKER_MAY_OUTLIVE_ITS_PARENT)
    assert list(tmp_path.glob("autofit*")) == []  # torch keeps a cache there, too


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_search_and_leaves_nothing(
    start: Any, running: Callable[[int], bool], hangs: Path, times: int
) -> None:
    parent = start(SEARCHES)
    read_until(parent.stdout, "ProbeStarted 1")
    (worker,) = children_of(parent.pid)
    assert wait_for(hangs.exists, SECONDS_TO_WAIT)
    for _ in range(times):
        parent.send_signal(signal.SIGINT)
    output = parent.communicate(timeout=SECONDS_TO_WAIT)[0]
    assert "changed: []" in output
    assert "report: interrupted 2" in output or (times == 2 and "interrupted" in output)
    assert not running(worker)


def test_a_search_that_was_killed_is_resumed_without_repeating(
    start: Any,
    running: Callable[[int], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study = tmp_path / "study.log"
    searches = SEARCHES.replace(
        "strategies=[],", f"strategies=[], max_probes=4, study={str(study)!r},"
    )
    parent = start(searches)
    read_until(parent.stdout, "ProbeStarted 1")
    (worker,) = children_of(parent.pid)
    parent.kill()
    assert wait_for(lambda: not running(worker), SECONDS_A_WORKER_MAY_OUTLIVE_ITS_PARENT)
    monkeypatch.setenv("CALM", "yes")
    resumed = start(searches)
    output = resumed.communicate(timeout=SECONDS_TO_WAIT)[0]
    assert "ProbeStarted 0" not in output, "the baseline was run again"
    assert "report:" in output
    assert "changed: []" in output
