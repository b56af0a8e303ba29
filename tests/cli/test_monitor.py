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
from autofit.cli.monitor import Timeline
from autofit.units import GIB, MIB
from emulated_gpu import Machine, find_card
from tests import browser

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


def test_a_command_is_run_and_its_memory_and_processor_time_are_told(tmp_path: Path) -> None:
    table, page = tmp_path / "t.csv", tmp_path / "t.html"
    in_a_child = '"$0" -c "$1" "$2" || exit $?'
    command = ["sh", "-c", in_a_child, sys.executable, HOLDS, "7"]
    given = monitor("--json", "--out", table, "--out", page, "--", *command)
    ran = subprocess.run(given, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode == 3
    assert "trained" in ran.stderr
    assert "ended with exit code 7" in ran.stderr
    told = json.loads(ran.stdout)
    rows = rows_of(table)
    seen = [int(row["resident_bytes"]) for row in rows]
    assert max(seen) == told["resident_bytes"] > 200 * MIB
    assert told["processor_percent"] > 0
    assert all(float(a["seconds"]) < float(b["seconds"]) for a, b in pairwise(rows))
    assert rows[0]["processor_percent"] == ""
    assert "peak host memory" in page.read_text()


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


def test_a_kill_of_the_monitor_loses_no_row(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    with lasting() as watched:
        given = monitor("--pid", str(watched.pid), "--out", table)
        with subprocess.Popen(given, stderr=subprocess.DEVNULL, text=True) as process:
            wait_for_rows(table, process)
            process.kill()
    text = table.read_text()
    assert text.endswith("\n")
    assert all(int(row["resident_bytes"]) > MIB for row in rows_of(table))


def test_ctrl_c_ends_the_watch_of_another_process_with_its_page(tmp_path: Path) -> None:
    table, page = tmp_path / "t.csv", tmp_path / "t.html"
    with lasting() as watched:
        given = monitor("--pid", str(watched.pid), "--out", table, "--out", page)
        with subprocess.Popen(given, stdout=subprocess.PIPE, text=True) as process:
            wait_for_rows(table, process)
            process.send_signal(signal.SIGTERM)  # as Ctrl-C, also where that is ignored
            out, _ = process.communicate(timeout=SECONDS)
        assert watched.poll() is None
    assert process.returncode == 0
    assert out.startswith(f"process {watched.pid}: 0:0")
    assert page.exists()


def test_a_signal_reaches_the_command_and_the_watch_ends_with_it(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
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
    assert process.returncode == 128 + signal.SIGTERM
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


def test_a_long_timeline_shows_the_most_bytes_and_the_mean_of_percents() -> None:
    timeline, count, high = Timeline("a"), 50_001, 31_417
    seen = [
        {
            "seconds": float(at),
            "resident_bytes": 7 * MIB if at == high else MIB,
            "processor_percent": 100.0 * (at % 2),
        }
        for at in range(count)
    ]
    timeline.fill(seen, lambda: None)
    assert timeline.seconds == count - 1
    assert timeline.totals["resident_bytes"] == 7 * MIB
    assert timeline.totals["processor_percent"] == pytest.approx(50, abs=0.1)
    path = timeline.page().partition('class="held-line" d="M')[2].partition('"')[0]
    places = [tuple(map(float, point.split())) for point in path.split("L")]
    assert len(places) <= 2000
    (peak,) = [x for x, y in places if y == min(y for _, y in places)]
    assert peak == pytest.approx(1000 * high / count, abs=1)


ON_A_GPU = """
import torch
held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
print("ready", flush=True)
import time; time.sleep(1.5)
"""


@pytest.mark.emulated
def test_the_memory_of_the_gpu_is_that_of_the_process(tmp_path: Path, machine: Machine) -> None:
    table = tmp_path / "t.csv"
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


@pytest.mark.browser
@pytest.mark.skipif(browser.CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_draws_its_charts_and_runs_no_name(tmp_path: Path) -> None:
    hostile = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"
    timeline = Timeline(hostile, gpus=[hostile])
    columns = ("gpu0_process_bytes", "gpu0_used_bytes", "resident_bytes")
    timeline.fill(
        ({"seconds": at, **dict.fromkeys(columns, MIB * (at + 1))} for at in range(3)),
        lambda: None,
    )
    page = tmp_path / "t.html"
    page.write_text(timeline.page())
    with browser.opened() as tab:
        tab.open(page, width=390, phone=True)
        assert tab.run("document.querySelectorAll('svg[role=img]').length") == 2
        assert tab.run("window.ran === undefined")
        assert tab.run("document.documentElement.scrollWidth") <= 390
        path = tab.run("document.querySelector('path.held-line').getAttribute('d')")
        heights = [float(point.split()[1]) for point in path[1:].split("L")]
        gaps = [one - other for one, other in pairwise(heights)]
        assert len(heights) == 3
        assert gaps[0] == pytest.approx(gaps[1], abs=0.2)
        assert gaps[0] > 0, "more memory is higher"
        assert tab.complaints == []
