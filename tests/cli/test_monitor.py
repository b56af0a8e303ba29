"""`autofit monitor`: what a real process held and used, in files that outlive the monitor."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

import emulated_gpu
from autofit.cli.main import app
from autofit.units import GIB, MIB
from emulated_gpu import Machine, find_card

SECONDS = 120
HOLDS = """
import sys, time
open("/proc/self/comm", "wb").write(b"\\xff) R 1")  # any bytes may be a name
held = bytearray(b"x") * (200 * 2**20)
until = time.process_time() + 0.3
while time.process_time() < until: pass
print("trained")
sys.exit(int(sys.argv[1]))
"""
LASTS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(0)))
print("ready", flush=True)
while True: time.sleep(0.1)
"""


def monitor(*given: str | Path) -> list[str]:
    return [sys.executable, "-m", "autofit", "monitor", "--every", "0.1", *map(str, given)]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_name_of_a_command_moves_no_terminal(tmp_path: Path) -> None:
    command = tmp_path / "\x1b]0;a title\x07"
    command.symlink_to("/bin/sleep")
    given = monitor("--", f"./{command.name}", "2")  # a longer name would be shortened
    ended = subprocess.run(
        given, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "a title" in ended.stdout
    assert "\x1b" not in ended.stdout


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "t.csv"


def test_a_command_is_run_and_the_memory_of_its_children_is_told(table: Path) -> None:
    in_a_child = '"$0" -c "$1" "$2" || exit $?'
    command = ["sh", "-c", in_a_child, sys.executable, HOLDS, "7"]
    given = monitor("--json", "--out", table, "--", *command)
    ran = subprocess.run(given, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode == 3
    assert "trained" in ran.stderr
    assert "non-zero exit status 7" in ran.stderr
    told = json.loads(ran.stdout)
    rows = rows_of(table)
    seen = [int(row["resident_bytes"]) for row in rows]
    assert max(seen) == told["resident_bytes"] > 200 * MIB
    assert all(float(a["seconds"]) < float(b["seconds"]) for a, b in pairwise(rows))
    assert told["seconds"] > float(rows[-1]["seconds"])


@contextmanager
def lasting() -> Iterator[subprocess.Popen[str]]:
    """A process that runs until it is told to end."""
    command = [sys.executable, "-c", LASTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def wait_for_rows(path: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if len(path.read_text().splitlines()) > 3:
                return
        time.sleep(0.02)
    raise AssertionError("the monitor ended by itself")


def test_a_kill_of_the_monitor_loses_no_row(table: Path) -> None:
    with lasting() as watched:
        given = monitor("--pid", str(watched.pid), "--out", table)
        with subprocess.Popen(given, stderr=subprocess.DEVNULL, text=True) as process:
            wait_for_rows(table, process)
            process.kill()
    text = table.read_text()
    assert text.endswith("\n")
    assert all(int(row["resident_bytes"]) > MIB for row in rows_of(table))


def test_ctrl_c_ends_the_watch_of_another_process(table: Path) -> None:
    with lasting() as watched:
        given = monitor("--pid", str(watched.pid), "--out", table)
        with subprocess.Popen(given, stdout=subprocess.PIPE, text=True) as process:
            wait_for_rows(table, process)
            process.send_signal(signal.SIGTERM)  # as Ctrl-C, also where that is ignored
            out, _ = process.communicate(timeout=SECONDS)
        assert watched.poll() is None
    assert process.returncode == 0
    assert out.startswith(f"process {watched.pid}: 0:0")


def test_a_signal_reaches_the_command_and_the_watch_ends_with_it(table: Path) -> None:
    given = monitor("--out", table, "--", sys.executable, "-c", LASTS)
    with subprocess.Popen(
        given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "ready\n":
            assert process.poll() is None
        while not (table.exists() and rows_of(table)):  # a look, or there is no memory to tell
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, "as the command's own"
    assert "saved" in err
    assert "peak host memory" in out


def test_what_cannot_be_watched_is_said() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for given, words in (
        (["--pid", str(gone.pid)], f"no process {gone.pid}"),
        (["--", "no-such-command"], "cannot run no-such-command: No such file"),
        ([], "give either a command after --"),
    ):
        ran = subprocess.run(
            monitor(*given), capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert ran.returncode == 2
        assert words in ran.stderr


ON_A_GPU = """
import torch
held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
print("ready", flush=True)
import time; time.sleep(1.5)
"""


@pytest.mark.emulated
def test_the_memory_of_the_gpu_is_that_of_the_process(table: Path, machine: Machine) -> None:
    cards = [find_card("L4"), find_card("T4")]
    environment = emulated_gpu.environment(cards, machine=machine, values=False)
    ran = subprocess.run(
        monitor("--json", "--out", table, "--", sys.executable, "-c", ON_A_GPU),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told, rows = json.loads(ran.stdout), rows_of(table)
    assert told["gpus"] == ["GPU 0 (NVIDIA L4)", "GPU 1 (NVIDIA T4)"]
    assert GIB < told["gpu0_process_bytes"] < 2 * GIB
    assert told["gpu0_process_bytes"] == told["gpu0_used_bytes"]
    assert "gpu1_process_bytes" not in told  # it was never there
    assert rows[0]["gpu0_process_bytes"] == ""  # before its context
    assert {row["gpu1_process_bytes"] for row in rows} == {""}


def test_a_watch_leaves_the_signal_handlers_as_they_were() -> None:
    ending = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in ending]
    app(["monitor", "--every", "0.1", "--", "sleep", "0.2"], standalone_mode=False)
    assert [signal.getsignal(number) for number in ending] == before
