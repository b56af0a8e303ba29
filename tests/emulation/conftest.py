"""Runs programs on emulated GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autofit.emulation.launch import emulated_environment, new_machine
from autofit.emulation.machine import Machine

SECONDS = 240

Run = Callable[..., str]


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine of its own for a test."""
    made = new_machine()
    yield made
    made.remove()


@pytest.fixture
def run_on(machine: Machine) -> Run:
    """Run a program on the machine, and return what it prints; it must end with status 0.

    Options are those of `emulated_environment`; operators have no values unless asked for.
    """

    def run(program: str, *arguments: str, **options: Any) -> str:
        extra = options.pop("variables", {})
        chosen: dict[str, Any] = {"machine": machine, "values": False} | options
        environment = emulated_environment(**chosen)
        ran = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=environment | extra,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return run
