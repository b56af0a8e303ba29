"""Owners and workers that are killed at any moment leave no process, and a worker's end is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit
from autofit.measurement import Outcome
from autofit.probing.prober import Target, open_prober
from tests.faulty_model import NO_FAULT, FaultyModel
from tests.probing.conftest import Probing

MARK = "OWNER_THAT_IS_KILLED"
SECONDS_TO_WAIT = 120.0
MOMENTS = 20


def starts_a_stray(model: Any, output: torch.Tensor) -> None:
    """A process in a session of its own, whose parent has ended."""
    nap = f"import subprocess, sys; subprocess.Popen({[sys.executable, '-S', '-c', NAP]})"
    subprocess.run([sys.executable, "-S", "-c", nap], start_new_session=True, check=True)


NAP = "import time; time.sleep(600)"


def probe_for_ever() -> None:
    """Probe a plan in one fresh worker after another."""
    workload = autofit.Workload(FaultyModel({4: starts_a_stray}), torch.ones(4, 16))
    with open_prober(workload, target=Target("cpu", "64MiB")) as prober:
        while True:
            Probing(prober).at(4)
            prober.renew()


def marked() -> set[int]:
    """The processes that run with the mark in the environment that they were started with."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            environment = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={os.getpid()}".encode() in environment.split(b"\0") and state not in "ZX":
            found.add(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_an_owner_that_is_killed_leaves_no_process(
    python: Callable[..., Any], tmp_path: Path, moment: int
) -> None:
    code = "from tests.probing.test_killed_at_any_moment import probe_for_ever; probe_for_ever()"
    environment = os.environ | {MARK: str(os.getpid()), "TMPDIR": str(tmp_path)}
    owner = python("-c", code, forks_workers=False, env=environment)
    end = time.monotonic() + SECONDS_TO_WAIT
    while not marked() - {owner.pid} and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.4 * moment)
    owner.kill()
    owner.wait()
    while (left := marked()) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left
    assert list(tmp_path.glob("autofit*")) == []


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_no_process_and_is_told(
    open_probing: Any, running: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(os.getpid()))
    probing = open_probing(FaultyModel({4: starts_a_stray}))
    for moment in range(MOMENTS):
        assert probing.at(NO_FAULT).ok
        (server,) = marked() & started_here()
        worker = probing.worker
        killer = threading.Timer(0.01 * moment, os.kill, (worker, signal.SIGKILL))
        killer.start()
        measurement = probing.at(4)
        killer.join()
        assert measurement.ok or (
            measurement.outcome in (Outcome.CRASHED, Outcome.HOST_OOM)
            and "SIGKILL" in (measurement.detail or "")
        )
        probing.prober.renew()
        assert not running(worker)
        end = time.monotonic() + SECONDS_TO_WAIT
        while marked() != {server} and time.monotonic() < end:
            time.sleep(0.02)  # the supervisor ends itself once it has said that nothing is left
        assert marked() == {server}


def started_here() -> set[int]:
    """The processes that this one has started itself."""
    here = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return {int(each) for each in here.read_text().split()}
