"""Runs programs on emulated GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import emulated_gpu
from emulated_gpu import Machine, new_machine

SECONDS = 240

Run = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = emulated_gpu.why_unavailable()
    for item in items:
        if reason and item.get_closest_marker("emulated") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine of its own for a test."""
    made = new_machine()
    yield made
    made.remove()


class Forks:
    """A process that runs programs in forks of itself (`forks.py`)."""

    def __init__(self) -> None:
        machine = new_machine()  # its own, which it never uses
        variables = emulated_gpu.environment(machine=machine) | {"EMULATED_GPU_VALUES": "0"}
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("forks.py")],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def run(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def run_on(machine: Machine, tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    """Run a program on the machine, and return what it prints; it must end with status 0.

    Options are those of `emulated_gpu.environment`; operators have no values unless asked for. With
    other variables it is not forked: torch reads some as it is imported.
    """

    def run(program: str, *arguments: str, **options: Any) -> str:
        extra: dict[str, str] = options.pop("variables", {})
        chosen: dict[str, Any] = {"machine": machine, "values": False} | options
        variables = emulated_gpu.environment(**chosen) | extra
        if extra or "import torch" not in program:
            ran = subprocess.run(
                [sys.executable, "-c", program, *arguments],
                env=variables,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            return ran.stdout
        out, err = tmp_path / "out", tmp_path / "err"
        for path in (out, err):
            path.unlink(missing_ok=True)
        asked = {"program": program, "arguments": arguments, "environment": variables}
        status = request.getfixturevalue("forks").run(asked | {"out": str(out), "err": str(err)})
        assert status == 0, out.read_text() + err.read_text()
        return out.read_text()

    return run
