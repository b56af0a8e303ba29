"""A forked interpreter sees of its world what a spawned one sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkedPopen, ForkServer

TELLS = """
import json, os, signal, sys
from pathlib import Path
print(json.dumps({
    "parent": os.getppid(), "leads a session": os.getsid(0) == os.getpid(),
    "arguments": sys.argv, "folder": os.getcwd(), "path": sys.path,
    "names": sorted(globals()), "environment": dict(os.environ),
    "mark": "AUTOFIT_WORKER=" + "a" * 32 in Path("/proc/self/environ").read_text(),
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
    "input": sys.stdin.read(), "interrupt": str(signal.getsignal(signal.SIGINT)),
    "piped": os.read(int(sys.argv[1]), 100).decode(),
}))
"""


@pytest.fixture
def forked(fork_server: ForkServer | None) -> Callable[..., subprocess.Popen[Any]]:
    if fork_server is None:
        pytest.skip("processes are not forked here")
    return lambda *arguments, **options: ForkedPopen(*arguments, server=fork_server, **options)


def test_it_inherits_the_same(forked: Any, tmp_path: Path) -> None:
    seen = []
    for popen in (subprocess.Popen, forked):
        readable, writable = os.pipe()
        os.write(writable, b"hello")
        with popen(
            [sys.executable, "-u", "-c", TELLS, str(readable)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[readable],
            start_new_session=True,
            cwd=tmp_path,
            env=os.environ | {"AUTOFIT_WORKER": "a" * 32},
            preexec_fn=_interruptible if popen is subprocess.Popen else None,
        ) as process:
            seen.append(json.loads(process.communicate(timeout=60)[0]))
        os.close(readable)
        os.close(writable)
    spawned, forked_one = seen
    assert spawned == forked_one
    assert spawned["parent"] == os.getpid()


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(
    ("program", "status", "last"),
    [
        ("print('done')", 0, "done"),
        ("import atexit, sys; atexit.register(print, 'bye'); sys.exit(3)", 3, "bye"),
        ("raise LookupError('gone')", 1, "LookupError: gone"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_it_ends_the_same(forked: Any, program: str, status: int, last: str) -> None:
    for popen in (subprocess.Popen, forked):
        with popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            shown = process.communicate(timeout=60)[0]
        assert process.returncode == status
        assert shown.rstrip("\n").rpartition("\n")[2] == last


def test_it_runs_modules_and_files(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert run_python("-m", "autofit", "--version").stdout.startswith("autofit ")
    script = tmp_path / "script.py"
    script.write_text("import beside, sys; print(__name__, __file__, sys.argv[1], beside.X)")
    (tmp_path / "beside.py").write_text("X = 3")
    assert run_python(script, "more").stdout == f"__main__ {script} more 3\n"
