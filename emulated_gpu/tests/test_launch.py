"""Starting processes on an emulated card: what they and their children find, and what is left."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import emulated_gpu
from emulated_gpu.machines import Machine

pytestmark = pytest.mark.emulated

Run = Callable[..., str]

GRANDCHILD = """
import subprocess, sys
program = (
    "import torch\\n"
    "print(torch.cuda.get_device_name(0), (torch.ones(3, device='cuda') * 2).sum().item())"
)
if len(sys.argv) < 2:
    print(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
"""


ENDED = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print("ready", flush=True)
time.sleep(60)
"""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "emulated_gpu", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_child_of_the_child_has_the_card_and_its_values(run_on: Run) -> None:
    assert "NVIDIA H200 6.0" in run_on(GRANDCHILD, values=True)


def test_nothing_is_written_into_the_environment_of_the_user(run_on: Run) -> None:
    run_on("import torch", values=True)
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    written = [path for folder in folders for path in Path(folder).glob("emulated_gpu_values*")]
    assert written == []


def test_the_command_runs_on_the_card_that_was_asked_for() -> None:
    program = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name(1))"
    card = ("--gpu", "L4", "--devices", "2", "--no-values")
    ran = command(*card, "--", sys.executable, "-c", program)
    assert ran.stdout == "2 NVIDIA L4\n", ran.stderr


def test_the_command_returns_what_its_program_returns_and_leaves_no_file() -> None:
    program = "import os, torch; torch.ones(1, device='cuda'); os._exit(7)"
    before = set(Path("/dev/shm").glob("emulated-gpu-*"))
    assert command("--no-values", "--", sys.executable, "-c", program).returncode == 7
    after = set(Path("/dev/shm").glob("emulated-gpu-*"))
    mine = {path for path in after - before if str(os.getpid()) in path.name}
    assert mine == set()


def test_the_command_says_what_it_does_not_understand() -> None:
    ran = command("--gpu", "L5", "--", "true")
    assert ran.returncode == 2
    assert "unknown GPU 'L5'" in ran.stderr
    ran = command("--fault", "launch", "--", "true")
    assert "a fault is given as" in ran.stderr


def test_an_environment_of_an_emulated_process_is_replaced(machine: Machine) -> None:
    once = emulated_gpu.environment(machine=machine, values=True)
    twice = emulated_gpu.environment(machine=machine, values=True, base=once)
    assert twice == once


def test_a_signal_to_the_command_reaches_its_program() -> None:
    ran = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "emulated_gpu",
            "run",
            "--no-values",
            "--",
            sys.executable,
            "-c",
            ENDED,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == "ready\n"
        ran.terminate()
        assert ran.wait(60) == 9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "no-such-program"], "no-such-program cannot be run: No such file"),
        (
            ["python", "train.py"],
            "python train.py is not understood: the command to run goes",
        ),
        (["--gpu", "L4"], "say what to run, after --"),
        (["--devices", "two", "--", "true"], "give a whole number of cards, got 'two'"),
        (["--devices", "9", "--", "true"], "at most 8 cards, got 9"),
        (["--memory", "100MiB", "--", "true"], "less than its context"),
        (["--memory", "much", "--", "true"], "cannot read 'much' as a size"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], said: str) -> None:
    ran = command(*arguments)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_memory_and_gpu_go_together() -> None:
    program = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.total_memory)"
    asked = ("--gpu", "L4", "--memory", "12GB", "--no-values")
    ran = command(*asked, "--", sys.executable, "-c", program)
    assert ran.stdout == f"NVIDIA L4 {12 * 10**9}\n", ran.stderr


def test_the_doctor_trains_on_a_card() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "emulated_gpu", "doctor"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    assert "training   on NVIDIA H200" in ran.stdout
