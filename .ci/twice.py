"""Run tests, and what failed once more and alone; list what passed the second time.

    python .ci/twice.py [--flaky FILE] [--again COMMAND] COMMAND...

There is a second run where tests failed and nothing else went wrong; the exit code is then that
run's. FILE gets two lines for each test that failed and then passed: its name, and what the first
run knew: load, seeds, error. COMMAND is pytest, or starts it; `twice_plugin` is then its plugin,
and --again is what to run the second time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
NOTES = "CI_TWICE_NOTES"
"""The variable that names the file for a run's notes."""
TESTS_FAILED = 1
"""What pytest exits with where tests failed, and nothing else went wrong."""
MAX_AGAIN = 20
"""Failures after which the second run ends: so many are no accident."""


def options_of_pytest(notes: Path) -> str:
    """Return what a run adds to PYTEST_ADDOPTS; jobs side by side have a cache each."""
    return f"-p twice_plugin -o cache_dir={notes.parent / 'cache'}"


def run(command: Sequence[str], notes: Path) -> int:
    """Run the command with `twice_plugin` as a plugin of pytest; return its exit code."""
    variables = os.environ | {NOTES: str(notes)}
    folders = (HERE, os.environ.get("PYTHONPATH"))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    options = (os.environ.get("PYTEST_ADDOPTS"), options_of_pytest(notes))
    variables["PYTEST_ADDOPTS"] = " ".join(filter(None, options))
    return subprocess.run(command, env=variables).returncode


def noted(file: Path) -> dict[str, Any]:
    """Return the notes of a run, which may have ended before it wrote any."""
    return json.loads(file.read_text()) if file.exists() else {"failed": {}, "passed": []}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flaky", type=Path, default=Path(os.devnull))
    parser.add_argument("--again")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first.json"), Path(folder, "second.json")
        code = run(asked.command, first)
        if code != TESTS_FAILED or not noted(first)["failed"]:
            return code
        print("== what failed, once more and alone", flush=True)
        again = shlex.split(asked.again) if asked.again else asked.command
        alone = ("-n", "0", "--last-failed", "--last-failed-no-failures", "none")
        code = run([*again, *alone, "--maxfail", str(MAX_AGAIN)], second)
        failed, passed = noted(first)["failed"], noted(second)["passed"]
    with asked.flaky.open("a") as file:
        for test in filter(failed.__contains__, passed):
            print(f"{test}\n    {failed[test]}", file=file)
    return code


if __name__ == "__main__":
    sys.exit(main())
