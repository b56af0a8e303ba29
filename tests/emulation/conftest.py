"""Runs programs on emulated GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import emulated_gpu
from emulated_gpu import Machine

SECONDS = 240
ENDS = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"  # freeing all of torch takes a second

Run = Callable[..., str]


@pytest.fixture
def run_on(machine: Machine, run_python: Any) -> Run:
    """Run a program on the machine, and return what it prints; it must end with status 0.

    Options are those of `emulated_gpu.environment`; operators have no values unless asked for. With
    other variables it is not forked: torch reads some as it is imported.
    """

    def run(program: str, *arguments: str, **options: Any) -> str:
        extra = options.pop("variables", {})
        chosen: dict[str, Any] = {"machine": machine, "values": False} | options
        environment = emulated_gpu.environment(**chosen)
        ran: subprocess.CompletedProcess[str]
        if "import torch" in program and not extra:
            ran = run_python("-c", program + ENDS, *arguments, env=environment)
        else:
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
