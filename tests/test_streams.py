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


@pytest.fixture
def unread() -> Iterator[IO[str]]:
    """A pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        yield stream  # closing it raises where it still holds text


def test_what_nobody_reads_is_dropped_and_the_stream_can_be_closed(unread: IO[str]) -> None:
    lossy, number = LossyStream(unread), os.fstat(unread.fileno()).st_ino
    for _ in range(3):
        print("a line", file=lossy, flush=True)
    assert isinstance(lossy.error, BrokenPipeError)
    assert os.fstat(unread.fileno()).st_ino == number  # still the same pipe
    unread.flush()  # holds nothing back


@has_full
def test_a_full_device_costs_the_text_alone() -> None:
    with FULL.open("w") as stream:
        lossy = LossyStream(stream)
        print("a line", file=lossy, flush=True)
        assert isinstance(lossy.error, OSError)
        stream.flush()


def test_a_reader_that_is_there_gets_every_line(capfd: pytest.CaptureFixture[str]) -> None:
    print("to out", file=LossyStream(LossyStream(sys.stdout)), flush=True)
    complain("to err")
    assert capfd.readouterr() == ("to out\n", "to err\n")


def test_there_may_be_no_stream_or_a_closed_one() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        lossy = LossyStream(stream)
        assert print("a line", file=lossy, flush=True) is None
        assert not lossy.isatty()


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


AFTER = {
    "closed": ">&-",
    "unread": "| true",
    "unread errors": "2>&1 | true",
    "all closed": "<&- >&- 2>&-",
}


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize(
    ("arguments", "code"), [(("report", str(REPORT)), 0), (("report", "missing.json"), 2)]
)
def test_a_command_keeps_its_exit_code(
    tmp_path: Path, arguments: tuple[str, ...], code: int, after: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    program = [sys.executable, "-m", "autofit", *arguments]
    script = f'"$@" {after}; echo "${{PIPESTATUS[0]}}" >code'
    subprocess.run(
        ["bash", "-c", script, "-", *program],
        cwd=tmp_path,
        env=environment,
        timeout=120,
        check=True,
    )
    assert (tmp_path / "code").read_text() == f"{code}\n"


OPENING = """
import os, sys
from autofit.cli.main import main
sys.argv = ["autofit", "--version"]
try:
    main()
except SystemExit:
    pass
with open("next", "w") as file:
    print(file.fileno(), file=file)
"""


def test_no_file_gets_the_number_of_a_closed_standard_stream(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPENING]
    subprocess.run(
        ["bash", "-c", '"$@" <&- >&- 2>&-', "-", *command], cwd=tmp_path, timeout=120, check=True
    )
    assert int((tmp_path / "next").read_text()) > 2


SEARCH = """
import autofit, torch
from torch import nn
report = autofit.search(
    nn.Linear(8, 4), torch.randn(4, 8), loss_fn=lambda model, batch: model(batch).square().mean(),
    device="cpu", vram_budget="16MiB", max_probes=1, strategies=[], progress=True)
report.save("report.json")
"""


def test_a_search_goes_on_where_nobody_reads_its_progress(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    script = '"$@" 2>&1 | true; echo "${PIPESTATUS[0]}" >code'
    program = [sys.executable, "-c", SEARCH]
    subprocess.run(
        ["bash", "-c", script, "-", *program],
        cwd=tmp_path,
        env=environment,
        timeout=240,
        check=True,
    )
    assert (tmp_path / "code").read_text() == "0\n"
    assert (tmp_path / "report.json").exists()
