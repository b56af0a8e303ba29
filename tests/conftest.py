"""What all tests share: GPU tests skip where there is no GPU, and the CPU is shared fairly.

Under `emulated-gpu run -- pytest` tests of a GPU run on an emulated one.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Workers inherit it: on two cores, several threads a process only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_WARM_POOL", "0")  # before 2.9 the import of the compiler starts it

import torch  # it reads the variable above when it is imported
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no name

from autofit import torch_flags
from autofit.probing.fork_server import ForkServer
from autofit.snapshot.snapshot import preserved
from emulated_gpu import Machine, new_machine, why_unavailable
from emulated_gpu.launch import MACHINE
from tests.forked_program import start_program
from tests.tiers import IMPORT_TRAINERS, tier_of, watch

EMULATED = MACHINE in os.environ
if EMULATED and "PYTEST_XDIST_WORKER" in os.environ:  # before the first use of the GPU: one each
    os.environ[MACHINE] += "." + os.environ["PYTEST_XDIST_WORKER"]


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests out, unless -m chooses or each argument names a file or a test."""
    files = [Path(each.partition("::")[0]).is_file() for each in config.args]
    if not config.option.markexpr and not all(files):
        config.option.markexpr = "not slow"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a unit test where unit tests alone are asked for."""
    return (config.option.markexpr == "unit" and collection_path.name in IMPORT_TRAINERS) or None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {
        "cuda": _why_no_cuda(),
        "emulated": why_unavailable(),
        "real_gpu": "this GPU is emulated" if EMULATED else _why_no_cuda(),
    }
    for item in items:
        if tier := tier_of(item):
            item.add_marker(tier)
        for marker, reason in reasons.items():
            # keywords hold names of folders too
            if reason and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _no_process_in_a_unit_test(request: pytest.FixtureRequest) -> Iterator[None]:
    watch().watching = request.node.get_closest_marker("unit") is not None
    yield
    watch().watching = False


def _why_no_cuda() -> str | None:
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU, and torch finds none"


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell starts what ends in "&" with SIGINT ignored, and what tests start would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Probes collect garbage many times, and need not go through all of pytest's and torch's."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the exit collect everything: libraries complain of what it did not."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _computing_as_before() -> Iterator[None]:
    """A flag of torch's that a test leaves changed would change the fingerprints of later tests."""
    before = torch_flags.computing()
    yield
    torch_flags.compute_as(before)


@pytest.fixture
def spared_process() -> Iterator[None]:
    """So that a failing test does not spoil the ones after it."""
    with preserved({}):
        yield


@pytest.fixture
def machine() -> Iterator[Machine]:
    """An emulated machine of its own for a test."""
    made = new_machine()
    yield made
    made.remove()


@pytest.fixture(scope="session")
def python() -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """Start an interpreter like `subprocess.Popen`, with torch imported already.

    Its workers are forked, too, unless `forks_workers=False` is given.
    """
    servers: list[ForkServer] = []

    def start(
        *arguments: str | Path, forks_workers: bool = True, **options: Any
    ) -> subprocess.Popen[Any]:
        if not servers or servers[-1].has_ended:
            servers.append(ForkServer())
        return start_program(servers[-1], *arguments, forks_workers=forks_workers, **options)

    yield start
    for server in servers:
        server.end()


@pytest.fixture(scope="session")
def run_python(
    python: Callable[..., subprocess.Popen[Any]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run an interpreter, started by `python`, to its end."""

    def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with python(*arguments, **pipes | options) as process:
            try:
                out, err = process.communicate(timeout=240)
            finally:
                process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return run


Told = tuple[str, str, set[int]]
"""Standard output and standard error of all ranks, and their exit codes."""


@pytest.fixture(scope="session")
def run_ranks(python: Callable[..., subprocess.Popen[Any]]) -> Callable[..., Told]:
    """Run a script or a module (`"-m", ...`) on ranks of this machine, as torchrun would."""

    def run(
        folder: Path, *command: str, ranks: int = 2, forks_workers: bool = True, **variables: str
    ) -> Told:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        world = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = []
        for rank in map(str, range(ranks)):
            env = os.environ | world | {"RANK": rank, "LOCAL_RANK": rank} | variables
            options = {"cwd": folder, "env": env, "forks_workers": forks_workers, **pipes}
            started.append(python(*command, **options))
        try:
            told = [rank.communicate(timeout=240) for rank in started]
        finally:
            for process in started:
                process.kill()
        out, errors = ("".join(texts) for texts in zip(*told, strict=True))
        return out, errors, {process.returncode for process in started}

    return run


@pytest.fixture(scope="session")
def on_two_ranks(run_ranks: Callable[..., Told]) -> Callable[[Path, str], Any]:
    """Run a script that trains on two ranks; return what one of them prints, as JSON."""

    def run(folder: Path, script: str) -> Any:
        (folder / "train.py").write_text(script)
        out, errors, codes = run_ranks(folder, "train.py", forks_workers=False)
        assert codes == {0}, errors
        return json.loads(out.splitlines()[-1])

    return run
