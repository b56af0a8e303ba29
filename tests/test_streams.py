"""Standard streams that are closed, full, or have no reader."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from autofit.streams import LossyStream, complain, lossy_standard_streams

FULL = Path("/dev/full")
has_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no full device")
REPORT = Path(__file__).parent / "report" / "tiny_resnet.json"


AFTER = {
    "closed": ">&-",
    "unread": "| true",
    "unread errors": "2>&1 | true",
    "all closed": "<&- >&- 2>&-",
}
OPENING = """
import os, sys
from autofit.cli.main import main
sys.argv = ["autofit", "--version"]
try:
    main()
except SystemExit:
    pass
with open("written", "w") as file:
    assert file.fileno() > 2
    print(file.fileno(), file=file)
"""
SEARCHING = """
import autofit, torch
from torch import nn
report = autofit.search(
    nn.Linear(8, 4), torch.randn(4, 8), loss_fn=lambda model, batch: model(batch).square().mean(),
    device="cpu", vram_budget="16MiB", max_probes=1, strategies=[], progress=True)
open("written", "w").write(report.to_text())
"""
CLOSED = io.StringIO()
CLOSED.close()


@pytest.fixture(params=["no reader", pytest.param("full", marks=has_full)])
def unread(request: pytest.FixtureRequest) -> Iterator[IO[str]]:
    """A pipe whose reader has gone, or a full device."""
    read, write = os.pipe()
    os.close(read)
    if request.param == "full":
        os.close(write)
        write = os.open(FULL, os.O_WRONLY)
    with os.fdopen(write, "w") as stream:
        yield stream  # closing it raises where it still holds text


def test_what_nobody_reads_is_dropped_and_the_stream_can_be_closed(
    unread: IO[str],
) -> None:
    lossy, number = LossyStream(unread), os.fstat(unread.fileno()).st_ino
    for _ in range(3):
        print("a line", file=lossy, flush=True)
    assert isinstance(lossy.error, OSError)
    assert os.fstat(unread.fileno()).st_ino == number  # still the same pipe
    unread.flush()  # holds nothing back


def test_a_reader_that_is_there_gets_every_line(capfd: pytest.CaptureFixture[str]) -> None:
    print("to out", file=LossyStream(LossyStream(sys.stdout)), flush=True)
    complain("to err")
    assert capfd.readouterr() == ("to out\n", "to err\n")


@pytest.mark.parametrize("stream", [None, CLOSED])
def test_there_may_be_no_stream_or_a_closed_one(stream: IO[str] | None) -> None:
    lossy = LossyStream(stream)
    assert print("a line", file=lossy, flush=True) is None
    assert not lossy.isatty()


def in_shell(folder: Path, after: str, *program: str) -> str:
    """Run it with redirections, and return its exit code."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    script = f'"$@" {after}; echo "${{PIPESTATUS[0]}}" >code'
    command = ["bash", "-c", script, "-", sys.executable, *program]
    subprocess.run(command, cwd=folder, env=environment, timeout=240, check=True)
    return (folder / "code").read_text().strip()


def test_a_character_that_the_encoding_lacks_is_written_as_an_escape() -> None:
    written = io.BytesIO()
    lossy = LossyStream(io.TextIOWrapper(written, "ascii"))
    print("50 \u00b5s \ud800", file=lossy, flush=True)
    assert written.getvalue() == b"50 \\xb5s \\ud800\n"
    assert lossy.error is None


def test_the_streams_are_as_before_afterwards() -> None:
    before = sys.stdin, sys.stdout, sys.stderr
    with lossy_standard_streams():
        print("to nobody who minds")
    assert (sys.stdin, sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize(("report", "code"), [(str(REPORT), "0"), ("missing.json", "2")])
def test_a_command_keeps_its_exit_code(tmp_path: Path, report: str, code: str, after: str) -> None:
    assert in_shell(tmp_path, after, "-m", "autofit", "report", report) == code


@pytest.mark.parametrize(
    ("program", "after"), [(OPENING, "<&- >&- 2>&-"), (SEARCHING, "2>&1 | true")]
)
def test_files_are_written_as_ever_where_a_stream_is_closed_or_not_read(
    tmp_path: Path, program: str, after: str
) -> None:
    """None gets the number of a closed stream, and a search goes on without its progress."""
    assert in_shell(tmp_path, after, "-c", program) == "0"
    assert (tmp_path / "written").read_text()
