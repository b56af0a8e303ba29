"""How results look: color for a terminal, none for a file or where NO_COLOR asks for that."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from autofit.cli.console import exit_code
from autofit.errors import Unsupported
from autofit.measurement import Outcome

REPORT = Path(__file__).parents[1] / "report" / "tiny_resnet.json"


def shown(columns: int, **environment: str) -> str:
    """What `autofit report` writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "autofit", "report", str(REPORT), "-v"],
        stdout=theirs,
        stdin=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "COLUMNS": str(columns), "TERM": "xterm"} | environment,
    )
    os.close(theirs)
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(ours, 2**16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert process.wait(60) == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("environment", "has_color"),
    [({}, True), ({"NO_COLOR": "1"}, False)],
)
def test_a_terminal_gets_color_unless_it_is_not_wanted(
    environment: dict[str, str], has_color: bool
) -> None:
    assert ("\x1b[" in shown(100, **environment)) is has_color


@pytest.mark.parametrize(("columns", "most"), [(60, 60), (250, 100)])
def test_text_is_as_wide_as_the_terminal_up_to_100_columns(columns: int, most: int) -> None:
    lines = shown(columns, NO_COLOR="1").splitlines()
    unbroken = ("    ", "Apply:", "More:", "Page:")  # code and commands
    bare = [line for line in lines if not line.startswith(unbroken)]
    assert most - 12 <= max(map(len, bare)) <= most


def test_a_terminal_without_columns_shows_the_report() -> None:
    assert "samples/s" in shown(1, NO_COLOR="1").replace("\n", " ")


def test_a_probe_of_settings_that_cannot_run_exits_as_a_prediction_of_them_does() -> None:
    assert exit_code(Outcome.UNSUPPORTED) == Unsupported.exit_code == 2
    assert exit_code(Outcome.USER_ERROR) == 3
