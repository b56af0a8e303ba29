"""What a terminal and a log are shown while a search runs, and how wide."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan, Settings
from autofit.searching import events
from autofit.searching.events import (
    Confirming,
    Event,
    EventWords,
    ProbeFinished,
    ProbeStarted,
    Progress,
    Repeating,
    StageStarted,
    Vetoed,
    logged,
)
from autofit.searching.progress import ProgressLine

PLAIN: Settings = {"folding.level": 0, "precision.dtype": "default"}
FOLDED: Settings = {**PLAIN, "folding.level": 2}


def progress(probes: int, best: Trial | None = None, oom_probes: int = 0) -> Progress:
    return Progress(probes, oom_probes, best, 61.0, 119.0, 20 - probes)


def ran(
    kind: TrialKind, plan: Plan, outcome: Outcome = Outcome.OK, detail: str | None = None
) -> Trial:
    times = [0.1] if outcome is Outcome.OK else []
    held = 30 * 2**20
    measurement = Measurement(outcome, detail, step_times_s=times, peak_reserved_bytes=held)
    return Trial(0, kind, plan, measurement)


BASELINE = ran(TrialKind.BASELINE, Plan(4, settings=PLAIN))
STORY: list[Event] = [
    StageStarted("looking the workload over: folding", progress(0)),
    ProbeStarted(BASELINE.plan, TrialKind.BASELINE, None, progress(0)),
    ProbeFinished(BASELINE, progress(1, BASELINE)),
    ProbeStarted(Plan(16, settings=FOLDED), TrialKind.SEARCH, None, progress(1, BASELINE)),
    ProbeFinished(
        ran(TrialKind.SEARCH, Plan(16, settings=FOLDED), Outcome.OOM, "CUDA out of memory"),
        progress(2, BASELINE, 1),
    ),
    Repeating(
        Plan(64, settings=PLAIN),
        Measurement(Outcome.CRASHED, "the worker was ended by SIGKILL\nit printed"),
        progress(2, BASELINE, 1),
    ),
    Vetoed(ran(TrialKind.VETOED, Plan(64, settings=PLAIN), Outcome.OOM), progress(2, BASELINE, 1)),
    ProbeFinished(
        ran(
            TrialKind.SEARCH,
            Plan(8, settings=FOLDED),
            Outcome.UNSUPPORTED,
            "no such kernel\nat all",
        ),
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


def test_a_log_gets_a_line_at_a_slow_rhythm_and_the_first_probe_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What puts the measurements in doubt has its line at any time."""
    slow = lines_of(STORY)
    assert [line.partition("] ")[2].partition(" |")[0] for line in slow] == [
        "looking the workload over: folding",
        "4 x 1: 40.0 samples/s, 30.0 MiB",
        "64 x 1: crashed (the worker was ended by SIGKILL), running it again",
    ]
    monkeypatch.setattr(events, "SECONDS_BETWEEN", 0.0)
    every = lines_of(STORY)
    assert set(slow) < set(every)
    assert len(every) == len([e for e in STORY if not isinstance(e, ProbeStarted)])


@pytest.mark.parametrize(
    ("trial", "told", "words"),
    [
        (
            BASELINE,
            progress(1, BASELINE),
            "best 40.0 samples/s | probe 1 of 20 | at most 1:59 left",
        ),
        (BASELINE, progress(2, BASELINE, 1), "probe 2 of 20, 1 out of memory"),
        (
            ran(TrialKind.BASELINE, Plan(4), Outcome.OOM),
            progress(1, None, 1),
            "| nothing fits yet |",
        ),
        (BASELINE, Progress(1, 0, BASELINE, 5.0, None, None), "samples/s | 1 probe"),
        (
            replace(BASELINE, kind=TrialKind.SEARCH),
            progress(4, BASELINE),
            "folding.level=0, precision.dtype=default",
        ),
    ],
    ids=["all", "out of memory", "nothing fits", "no limits", "resumed"],
)
def test_a_line_says_the_best_the_probes_and_the_time_left(
    trial: Trial, told: Progress, words: str
) -> None:
    (line,) = lines_of([ProbeFinished(trial, told)])
    assert words in line
    assert ("left" in line) is (told.seconds_left is not None)


def unlimited(probes: int, elapsed_s: float) -> Progress:
    return Progress(probes, 0, BASELINE, elapsed_s, None, None, usual_probes=(10, 30))


@pytest.fixture
def words() -> EventWords:
    """After the first probe, which took 2 s: such a search takes 10 to 30."""
    words = EventWords()
    words.learn(ProbeStarted(BASELINE.plan, TrialKind.BASELINE, None, unlimited(0, 40.0)))
    words.learn(ProbeFinished(BASELINE, unlimited(1, 42.0)))
    return words


def test_the_time_left_is_by_the_probes_where_they_end_sooner() -> None:
    """Two probes took 20 s after a preparation of 40 s, and three are left: 30 s."""
    told = [Progress(n, 0, BASELINE, 40.0 + 10.0 * n, None, 5 - n) for n in range(3)]
    words = EventWords()
    words.learn(ProbeStarted(BASELINE.plan, TrialKind.BASELINE, None, told[0]))
    for each in told[1:]:
        words.learn(ProbeFinished(BASELINE, each))
    assert "about 0:30 left" in words.standing(told[2])
    assert "about 0:20 left" in words.standing(told[2], waited_s=10.0)
    assert "at most 0:20 left" in words.standing(replace(told[2], seconds_left=20.0))


def test_without_a_limit_the_probes_are_shown_beside_the_usual_number(words: EventWords) -> None:
    """How long the later ones take is not known, so no clock tells when the search ends."""
    assert "probe 1 of usually 10 to 30" in words.standing(unlimited(1, 42.0))
    assert "probe 20 of usually 10 to 30" in words.standing(unlimited(20, 42.0))
    assert "31 probes" in words.standing(unlimited(31, 42.0))
    assert not any("left" in part for part in words.standing(unlimited(1, 42.0)))
    assert "at most 1:40 left" in words.standing(replace(unlimited(1, 42.0), seconds_left=100.0))


def speed(plan: Plan, step_s: float) -> Trial:
    trial = ran(TrialKind.SEARCH, plan)
    return replace(trial, measurement=replace(trial.measurement, step_times_s=[step_s]))


def test_a_best_that_falls_says_why() -> None:
    words, fast = EventWords(), Plan(8, settings=FOLDED)
    shown = []
    for best in (
        speed(fast, 0.1),
        speed(Plan(4, settings=PLAIN), 0.06),
        speed(Plan(4, settings=PLAIN), 0.08),
        speed(Plan(4, settings=PLAIN), 0.08),
        speed(Plan(16, settings=PLAIN), 0.2),
    ):
        told = unlimited(3, 42.0)
        words.learn(ProbeFinished(best, replace(told, best=best)))
        shown.append(words.standing(replace(told, best=best))[0])
    assert shown == [
        "best 80.0 samples/s",
        "best 66.7 samples/s (the one before was slower when measured again)",
        "best 50.0 samples/s (it was slower when measured again)",
        "best 50.0 samples/s (it was slower when measured again)",
        "best 80.0 samples/s",
    ]


@pytest.mark.parametrize("waited_s", [0.0, 1.0, 1e3])
def test_no_clock_stands_at_zero(words: EventWords, waited_s: float) -> None:
    for told in (
        *(unlimited(probes, 42.0) for probes in range(1, 40)),
        *(Progress(19, 0, BASELINE, 42.0, None, left) for left in range(3)),
        *(Progress(19, 0, BASELINE, 42.0, left, None) for left in (0.0, 0.4, 30.0)),
    ):
        assert not any("0:00" in part for part in words.standing(told, waited_s))
    began = StageStarted("starting a worker", Progress(0, 0, None, 0.3, None, None))
    assert lines_of([began]) == ["starting a worker"]


def test_a_log_does_not_say_that_a_target_is_loaded_which_may_be_mistyped() -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as show:
        show.show_stage("loading train.py:mkae")
    assert stream.getvalue() == ""


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
    assert any("running 4 x 1" in frame for frame in live)
    assert any("best 40.0 samples/s | probe 1 of 20" in frame for frame in live)
    assert max(map(len, live)) <= 60
    (stays,) = [frame for frame in frames if frame not in live]
    assert "crashed (the worker was ended by SIGKILL), running it again" in stays


def test_every_event_is_logged_and_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    passed: list[Event] = []
    show = logged(passed.append)
    with caplog.at_level(logging.INFO, logger="autofit"):
        for event in STORY:
            show(event)
    assert passed == STORY
    assert len(caplog.records) == len([e for e in STORY if not isinstance(e, ProbeStarted)])
    doubtful = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(doubtful) == 1
    assert "running it again" in doubtful[0]


@pytest.mark.slow
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
                **more,
            )
        return b"".join(received).decode()

    assert "running 4 x 1" in shown()
    assert "running" not in shown(progress=False)


# -- How results look: color for a terminal, none for a file or where NO_COLOR asks for that

REPORT = Path(__file__).parents[1] / "report" / "tiny_resnet.json"


@pytest.mark.parametrize(
    ("columns", "environment", "most"), [(60, {"NO_COLOR": "1"}, 60), (250, {}, 100)]
)
def test_text_is_as_wide_as_the_terminal_up_to_100_columns_and_has_color_unless_unwanted(
    monkeypatch: pytest.MonkeyPatch, columns: int, environment: dict[str, str], most: int
) -> None:
    with terminal(columns, monkeypatch) as (descriptor, received):
        subprocess.run(
            [sys.executable, "-m", "autofit", "report", str(REPORT), "-v"],
            stdout=descriptor,
            stdin=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "COLUMNS": str(columns), "TERM": "xterm"}
            | environment,
            timeout=250,
            check=True,
        )
    shown = b"".join(received).decode()
    assert ("\x1b[" in shown) is (not environment)
    unbroken = ("    ", "Apply:", "More:", "Page:")  # code and commands
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()
    bare = [line for line in lines if not line.startswith(unbroken)]
    assert most - 12 <= max(map(len, bare)) <= most


def test_plans_are_shown_without_the_settings_of_the_baseline_that_ran_first() -> None:
    """The baseline begins before it is known which settings it leaves at their first values."""
    words, progress = EventWords(), Progress(1, 0, None, 1.0, None, None)
    bare = Plan(4)
    full = Plan(4, settings={"precision.dtype": "default", "compile.mode": "off"})
    words.learn(ProbeStarted(bare, TrialKind.BASELINE, None, progress))
    measured = Measurement(Outcome.OK, step_times_s=[0.1] * 3)
    words.learn(ProbeFinished(Trial(0, TrialKind.BASELINE, full, measured), progress))
    half = Plan(8, settings={**full.settings, "precision.dtype": "bfloat16"})
    assert words.doing(ProbeStarted(half, TrialKind.SEARCH, None, progress)) == (
        "running 8 x 1, precision.dtype=bfloat16"
    )
