"""The progress of a search as plain lines for a log, and as a live line for a terminal."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.cli.progress import ProgressLine
from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Plan, Settings
from autofit.searching import wording
from autofit.searching.events import (
    Confirming,
    Event,
    ProbeFinished,
    ProbeStarted,
    Progress,
    Repeating,
    StageStarted,
    Vetoed,
)
from autofit.searching.wording import logged

PLAIN: Settings = {"folding.level": 0, "precision.dtype": "as_is"}
FOLDED: Settings = {**PLAIN, "folding.level": 2}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_silences_the_progress_and_nothing_else() -> None:
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115  # closing it fails, too
    try:
        with ProgressLine(full) as line:
            for event in STORY:
                line(event)
    finally:
        with suppress(OSError):
            full.close()


def progress(probes: int, best: Trial | None = None, oom_probes: int = 0) -> Progress:
    return Progress(probes, oom_probes, best, 61.0, 119.0, 20 - probes)


def ran(role: Role, plan: Plan, outcome: Outcome = Outcome.OK, detail: str | None = None) -> Trial:
    times = [0.1] if outcome is Outcome.OK else []
    held = 30 * 2**20
    measurement = Measurement(outcome, detail, step_times_s=times, peak_reserved_bytes=held)
    return Trial(0, role, plan, measurement)


BASELINE = ran(Role.BASELINE, Plan(4, settings=PLAIN))
STORY: list[Event] = [
    StageStarted("looking the workload over: folding", progress(0)),
    ProbeStarted(BASELINE.plan, Role.BASELINE, None, progress(0)),
    ProbeFinished(BASELINE, progress(1, BASELINE)),
    ProbeStarted(Plan(16, settings=FOLDED), Role.SEARCH, None, progress(1, BASELINE)),
    ProbeFinished(
        ran(Role.SEARCH, Plan(16, settings=FOLDED), Outcome.OOM, "CUDA out of memory"),
        progress(2, BASELINE, 1),
    ),
    Repeating(
        Plan(64, settings=PLAIN),
        Measurement(Outcome.CRASHED, "the worker was ended by SIGKILL\nit printed"),
        progress(2, BASELINE, 1),
    ),
    Vetoed(ran(Role.VETOED, Plan(64, settings=PLAIN), Outcome.OOM), progress(2, BASELINE, 1)),
    ProbeFinished(
        ran(Role.SEARCH, Plan(8, settings=FOLDED), Outcome.UNSUPPORTED, "no such kernel\nat all"),
        progress(3, BASELINE, 1),
    ),
    Confirming("nothing is left to try", progress(3, BASELINE, 1)),
]


def lines_of(story: list[Event]) -> list[str]:
    stream = io.StringIO()
    with ProgressLine(stream) as show:
        for event in story:
            show(event)
    return stream.getvalue().splitlines()


def test_a_log_gets_one_line_for_each_thing_that_happened() -> None:
    assert lines_of(STORY) == [
        "[1:01] looking the workload over: folding",
        "[1:01] probe 1 (baseline) 4 x 1: ok, 40.0 samples/s, held 30.0 MiB | "
        "best 40.0 samples/s, 0 OOM, at most 1:59 or 19 probes left",
        "[1:01] probe 2 (search) 16 x 1, folding.level=2: oom, held 30.0 MiB | "
        "best 40.0 samples/s, 1 OOM, at most 1:59 or 18 probes left",
        "64 x 1: crashed (the worker was ended by SIGKILL), again in a fresh worker",
        "refused before it ran: 64 x 1",
        "[1:01] probe 3 (search) 8 x 1, folding.level=2: unsupported, held 30.0 MiB "
        "(no such kernel) | best 40.0 samples/s, 1 OOM, at most 1:59 or 17 probes left",
        "confirming the leading plans: nothing is left to try",
    ]


def test_as_long_as_nothing_fits_it_says_so() -> None:
    failed = ran(Role.BASELINE, Plan(4), Outcome.OOM)
    (line,) = lines_of([ProbeFinished(failed, progress(1, None, 1))])
    assert "| nothing fits yet, 1 OOM" in line


def test_without_limits_no_time_is_promised() -> None:
    free = Progress(1, 0, BASELINE, 5.0, None, None)
    (line,) = lines_of([ProbeFinished(BASELINE, free)])
    assert "left" not in line


def test_a_resumed_search_shows_settings_in_full() -> None:
    (line,) = lines_of([ProbeFinished(BASELINE, progress(4, BASELINE))])
    assert "folding.level=0, precision.dtype=as_is" in line


@contextmanager
def terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, list[bytes]]]:
    """A pseudo-terminal: the descriptor to write to, and what came out at its other end."""
    for name in ("NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    ours, theirs = pty.openpty()
    received: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(ours, 65536):
                received.append(chunk)
        except OSError:  # the other end is closed: so a pseudo-terminal ends on Linux
            return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs, received
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def test_a_terminal_gets_a_live_line_that_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        terminal(60, monkeypatch) as (descriptor, received),
        os.fdopen(os.dup(descriptor), "w") as stream,
        ProgressLine(stream) as show,
    ):
        for event in STORY:
            show(event)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(received).decode())
    frames = [frame.strip() for frame in re.split(r"[\r\n]+", drawn) if frame.strip()]
    live = [frame for frame in frames if re.match(r"[-\\|/] ", frame)]
    assert any("looking the workload over" in frame for frame in live)
    assert any("probe 1 (baseline) 4 x 1 | nothing fits yet | 0 OOM" in frame for frame in live)
    assert any("probe 2 (search) 16 x 1, folding.level=2 | best" in frame for frame in live)
    assert max(map(len, live)) <= 60
    done = [frame for frame in frames if frame not in live]
    assert done == [
        "probe 1 (baseline) 4 x 1: ok, 40.0 samples/s, held 30.0 MiB",
        "probe 2 (search) 16 x 1, folding.level=2: oom, held 30.0 MiB",
        "64 x 1: crashed (the worker was ended by SIGKILL), again in a fresh worker",
        "refused before it ran: 64 x 1",
        "probe 3 (search) 8 x 1, folding.level=2: unsupported, held 30.0 MiB (no such kernel)",
        "confirming the leading plans: nothing is left to try",
    ]


def test_every_event_is_logged_and_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    passed: list[Event] = []
    show = logged(passed.append)
    with caplog.at_level(logging.INFO, logger="autofit"):
        for event in STORY:
            show(event)
    assert passed == STORY
    assert [record.getMessage() for record in caplog.records] == lines_of(STORY)
    doubtful = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(doubtful) == 1
    assert "again in a fresh worker" in doubtful[0]


def test_a_search_shows_its_progress_in_a_terminal_unless_told_not_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shown(**more: Any) -> str:
        with (
            terminal(100, monkeypatch) as (descriptor, received),
            os.fdopen(os.dup(descriptor), "w") as stream,
        ):
            monkeypatch.setattr(sys, "stderr", stream)
            autofit.search(
                nn.Linear(8, 4),
                torch.randn(4, 8),
                loss_fn=lambda model, batch: model(batch).square().mean(),
                device="cpu",
                vram_budget="16MiB",
                max_probes=1,
                isolation="inprocess",
                **more,
            )
        return b"".join(received).decode()

    assert "probe 1 (baseline) 4 x 1: ok" in shown()
    assert "probe" not in shown(progress=False)


def test_a_file_is_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream, ProgressLine(stream) as show:
        show(STORY[2])
    assert path.read_text().startswith("[1:01] probe 1 (baseline)")
    assert "\x1b" not in path.read_text()


@pytest.mark.parametrize(("between_s", "is_shown"), [(0.0, True), (3600.0, False)])
def test_a_log_that_nobody_watches_gets_plain_lines_at_a_slow_rhythm(
    between_s: float,
    is_shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wording, "SECONDS_BETWEEN", between_s)
    given: dict[str, Any] = {"device": "cpu", "vram_budget": "16MiB", "isolation": "inprocess"}
    autofit.search(nn.Linear(8, 4), torch.randn(4, 8), max_probes=1, **given)
    lines = capsys.readouterr().err.splitlines()
    probe = [line for line in lines if re.match(r"autofit: \[\d+:\d\d\] probe 1 \(base", line)]
    assert len(probe) == is_shown
    assert "\x1b" not in "".join(lines)


def test_a_log_that_logging_writes_is_not_written_twice(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(wording, "SECONDS_BETWEEN", 0.0)
    show = logged(None, slowly=True)
    with caplog.at_level(logging.INFO, logger="autofit"):
        for event in STORY:
            show(event)
    assert len(caplog.records) > 3
    assert capsys.readouterr().err == ""
