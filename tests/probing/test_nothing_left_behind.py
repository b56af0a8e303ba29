"""However a search or its process ends, nothing of it is left and nothing of the user's changed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import autofit
from autofit.errors import SearchTimedOut
from autofit.measurement import Outcome
from autofit.probing.prober import Target, open_prober
from autofit.testing.digest import differences, digest
from tests.faulty_model import NO_FAULT, FaultyModel
from tests.probing.conftest import Probing

BATCH = 4


class Restless(nn.Module):
    """Changes in every way that a forward may, and is asked to fail where `fault` says."""

    scratch: torch.Tensor

    def __init__(self, fault: Callable[[int], object]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Dropout(0.2))
        self.head = nn.Linear(256, 8)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.calls = 0
        self.seen: list[int] = []
        self.fault = fault

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(inputs))
        self.scratch += 1
        random.random()
        numpy.random.rand()
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        warnings.simplefilter("ignore")
        self.fault(len(inputs))
        return self.head(self.body(inputs))


def behaves(_: int) -> None:
    """Never fails; the budget ends the climb."""


def refuses(samples: int) -> None:
    if samples > BATCH:
        raise RuntimeError("CUDA error: invalid configuration argument")


def has_a_bug(_: int) -> None:
    raise KeyError("a bug of the user's")


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """A live optimizer with a state, and gradients that the user has left on the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        torch.autograd.backward(model(torch.ones(BATCH, 8)).sum())
        optimizer.step()
    return optimizer


def searched(model: nn.Module, optimizer: Any, **limits: Any) -> Any:
    arguments = {"strategies": [], "device": "cpu", "vram_budget": "8MiB"} | limits
    batch = torch.ones(BATCH, 8)
    return autofit.search(model, batch, optimizer=optimizer, **arguments)


@pytest.mark.usefixtures("spared_process")
@pytest.mark.parametrize(
    ("fault", "limits", "ends"),
    [
        (behaves, {"max_probes": 4, "strategies": ["precision"]}, None),
        (behaves, {"timeout": 1e-3}, SearchTimedOut),
        (refuses, {"max_probes": 3}, None),
        (has_a_bug, {}, KeyError),
    ],
    ids=["to the end", "out of time", "size limit", "the user's bug"],
)
def test_a_search_leaves_nothing_behind(
    fault: Any,
    limits: dict[str, Any],
    ends: type[Exception] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = Restless(behaves)
    objects: dict[str, Any] = {"model": model, "optimizer": trained(model)}
    model.fault = fault
    before = digest(objects)
    if ends is None:
        assert searched(**objects, **limits).best.measurement.ok
    else:
        with pytest.raises(ends, match=r"a bug of the user's|timeout"):
            searched(**objects, **limits)
    assert differences(before, digest(objects)) == []
    left = {path.name for path in tmp_path.iterdir()}
    assert not {name for name in left if not name.startswith("torchinductor")}  # torch's own cache


KEPT: dict[str, list[Any]] = {"losses": []}


def counts_in_globals(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    KEPT["losses"].append(0.0)
    return model(samples).mean()


def test_a_prediction_leaves_globals_and_the_network_that_a_function_hands_out_alone() -> None:
    network = nn.Linear(8, 4)
    before = network.weight.detach().clone()
    workload = autofit.Workload(lambda: network, torch.ones(BATCH, 8), loss_fn=counts_in_globals)
    autofit.predict(workload, gpu="H100")
    assert KEPT == {"losses": []}
    assert torch.equal(network.weight, before)


# -- The parent is killed or interrupted: no worker is left, and nothing of the user's has

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


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + SECONDS_TO_WAIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    ("arguments", "forks_workers"),
    [
        (["start_importing"], False),
        (["start"], False),
        (["probe", "sleep"], True),
        (["probe", "hold_the_interpreter"], False),
        (["probe", "refuse_the_death_signal"], False),
    ],
    ids=["importing", "asked nothing", "asleep", "interpreter locked", "death signal refused"],
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
    assert wait_for(hangs.exists)
    worker = int(hangs.read_text())
    assert running(worker)
    parent.kill()
    assert wait_for(lambda: not running(worker))
    assert list(tmp_path.glob("autofit*")) == []  # torch keeps a cache there, too


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_search_and_leaves_nothing(
    start: Any, running: Callable[[int], bool], hangs: Path, times: int
) -> None:
    parent = start("search")
    assert wait_for(hangs.exists)
    worker = int(hangs.read_text())
    for _ in range(times):
        parent.send_signal(signal.SIGINT)
    output = parent.communicate(timeout=SECONDS_TO_WAIT)[0]
    assert "changed: []" in output
    assert "report: interrupted 2" in output or (times == 2 and "interrupted" in output)
    assert not running(worker)


# -- Owners and workers that are killed at any moment leave no process, and a worker's end is told.

MARK = "OWNER_THAT_IS_KILLED"
MOMENTS = 20


def starts_a_stray(model: Any, output: torch.Tensor) -> None:
    """A process in a session of its own, whose parent has ended."""
    nap = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    starts = [sys.executable, "-S", "-c", f"import subprocess; subprocess.Popen({nap})"]
    subprocess.run(starts, start_new_session=True, check=True)


def probe_for_ever() -> None:
    """Probe a plan in one fresh worker after another."""
    workload = autofit.Workload(FaultyModel({4: starts_a_stray}), torch.ones(4, 16))
    with open_prober(workload, target=Target("cpu", "64MiB")) as prober:
        while True:
            Probing(prober).at(4)
            prober.renew()


def are_left(processes: set[int]) -> bool:
    """Whether these run with the mark, and no others."""
    return marked() == processes


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
    code = "from tests.probing.test_nothing_left_behind import probe_for_ever; probe_for_ever()"
    environment = os.environ | {MARK: str(os.getpid()), "TMPDIR": str(tmp_path)}
    owner = python("-c", code, forks_workers=False, env=environment)
    assert wait_for(lambda: bool(marked() - {owner.pid}))
    time.sleep(0.4 * moment)
    owner.kill()
    owner.wait()
    assert wait_for(partial(are_left, set()))
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
        # the supervisor ends itself once it has said that nothing is left
        assert wait_for(partial(are_left, {server}))


def started_here() -> set[int]:
    """The processes that this one has started itself."""
    here = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return {int(each) for each in here.read_text().split()}
