"""CI tells a test that fails at times from one that is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "twice.py"
RIGHT = "def test_right():\n    assert True\n"
WRONG = "def test_wrong():\n    assert 1 == 2\n"
FLAKY = """
import os, pathlib
def test_flaky():
    ran = pathlib.Path("ran")
    before = ran.exists()
    ran.touch()
    assert before, "the first time"
"""
STARTS_PYTEST = """
import os, subprocess, sys
def test_starts_pytest():
    inner = (sys.executable, "-m", "pytest", "-q", "inner.py")
    failing = subprocess.run(inner, capture_output=True)
    assert failing.returncode == 1
    assert "twice" not in os.environ["PYTEST_ADDOPTS"]
"""


def ran(folder: Path, *options: str, **files: str) -> tuple[int, str, list[str]]:
    """The exit code, what is printed, and the lines of the list."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    tests = [f"{name}.py" for name in files if name.startswith("test")]
    pytest_ = (sys.executable, "-m", "pytest", "-p", "no:autofit", *options, *tests)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--flaky", "flaky.txt", *pytest_],
        cwd=folder,
        env=os.environ | {"PYTHONHASHSEED": "17", "PYTEST_ADDOPTS": "-q"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    listed = folder / "flaky.txt"
    lines = listed.read_text().splitlines() if listed.exists() else []
    return done.returncode, done.stdout + done.stderr, lines


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_passes_the_second_time_is_listed_and_fails_nothing(
    tmp_path: Path, workers: str
) -> None:
    code, out, (name, why) = ran(tmp_path, "-n", workers, test_a=FLAKY + RIGHT, test_b=RIGHT)
    assert code == 0, out
    assert name == "test_a.py::test_flaky"
    assert "load" in why
    assert "PYTHONHASHSEED=17" in why
    assert why.endswith("AssertionError: the first time")


def test_what_fails_twice_fails_and_is_not_listed(tmp_path: Path) -> None:
    code, out, listed = ran(tmp_path, "-n", "0", test_a=FLAKY + WRONG)
    assert code == 1, out
    assert [line for line in listed if "::" in line] == ["test_a.py::test_flaky"]


def test_a_run_without_a_failure_lists_nothing(tmp_path: Path) -> None:
    assert ran(tmp_path, "-n", "0", test_a=RIGHT)[::2] == (0, [])


def test_tests_that_do_not_start_are_no_accident(tmp_path: Path) -> None:
    code, _, listed = ran(tmp_path, "--no-such-option", test_a=RIGHT)
    assert (code == 0, listed) == (False, [])


def test_a_module_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    code, _, listed = ran(tmp_path, "-n", "0", test_a="import no_such_module\n" + RIGHT)
    assert (code == 0, listed) == (False, [])


def test_a_run_that_ends_early_fails_though_what_failed_passes_alone(tmp_path: Path) -> None:
    ends = 'import pytest\ndef test_ends():\n    pytest.exit("full disk", returncode=3)\n'
    code, out, listed = ran(tmp_path, "-n", "0", test_a=FLAKY, test_b=ends, test_c=WRONG)
    assert (code, listed) == (3, []), out


def test_a_worker_that_dies_once_is_listed(tmp_path: Path) -> None:
    dies = FLAKY.replace('assert before, "the first time"', "before or os._exit(3)")
    code, out, (name, why) = ran(tmp_path, "-n", "1", test_a=dies)
    assert (code, name) == (0, "test_a.py::test_flaky"), out
    assert "crashed" in why


def test_pytest_started_by_a_test_is_not_watched(tmp_path: Path) -> None:
    assert ran(tmp_path, "-n", "0", test_a=STARTS_PYTEST, inner=WRONG)[::2] == (0, [])
