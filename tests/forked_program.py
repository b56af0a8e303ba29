"""Interpreters that begin with torch imported: what a test starts runs in a fork of its server.

This file is run in place of `python ARGUMENTS...`: it passes signals on to the fork, and ends as
that ends.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from autofit.probing import fork_server
from autofit.probing.fork_server import ForkServer, surroundings


def start_program(
    server: ForkServer, *arguments: str | Path, forks_workers: bool, **options: Any
) -> subprocess.Popen[Any]:
    """Start `python ARGUMENTS...`, with the options of `subprocess.Popen`.

    Args:
        server: forks it.
        forks_workers: whether the server forks workers of this program, too.
    """
    requests = server.requests.fileno()
    program = (__file__, requests, forks_workers, *arguments)
    command = [sys.executable, "-P", *map(str, program)]
    return subprocess.Popen(command, pass_fds=[requests], **options)


def _stand_for_it(requests: int, forks_workers: bool, arguments: list[str]) -> int:
    """Run the program in a fork, and return its exit status."""
    given = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "forks_workers": forks_workers,
    }
    ours, theirs = Pipe()
    try:
        with socket.socket(fileno=requests) as server, theirs:
            descriptors = [theirs.fileno(), 0, 1, 2, requests]
            socket.send_fds(server, [b"tests.forked_program:run"], descriptors)
        ours.send(given)
        pid = ours.recv()
    except (ConnectionError, EOFError):  # it had nothing to do, and has ended
        os.execv(sys.executable, [sys.executable, *arguments])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status: int = ours.recv()
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


# In the fork.


class _Shared(ForkServer):
    """A server that the tests' process started."""

    def __init__(self, requests: int) -> None:
        self.requests, self.has_forked = socket.socket(fileno=requests), False

    @property
    def has_ended(self) -> bool:
        return self.requests.fileno() < 0

    def end(self, grace_s: float = 0.0) -> tuple[int, bytes]:
        self.requests.close()
        return -signal.SIGKILL, b""


def run(stand_in: Connection, *given: Connection) -> None:
    """Run a program until it ends, or the process that stands for it has ended.

    Args:
        stand_in: sends the program, and is told its process id and its exit status.
        given: its standard streams, and the server's requests.
    """
    program = stand_in.recv()
    if (pid := os.fork()) == 0:
        stand_in.close()
        _become(program, *given)
    for each in given:
        each.close()
    stand_in.send(pid)
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if stand_in.poll(0.02):
            os.kill(pid, signal.SIGKILL)
    with suppress(OSError):
        stand_in.send(os.waitstatus_to_exitcode(ended[1]))


def _become(program: dict[str, Any], *given: Connection) -> NoReturn:
    """Do what a new interpreter does."""
    os.setsid()
    gc.enable()
    *streams, requests = given
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.path[:] = program["path"]
    if program["forks_workers"]:
        fork_server._servers[surroundings()] = _Shared(os.dup(requests.fileno()))
    requests.close()
    _end(_program(program["arguments"]))


def _end(program: Callable[[], object]) -> NoReturn:
    """Run it, and end as an interpreter does but for freeing all modules, which takes a second."""
    status = 0
    try:
        program()
    except KeyboardInterrupt:
        raise  # an interpreter ends of the signal
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if not isinstance(left.code, int | None):
            print(left.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter calls, too
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # either may be closed
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, as where a pipe is broken
            status = status or 120
    os._exit(status & 0xFF)


def _program(arguments: list[str]) -> Callable[[], object]:
    while arguments[0] in ("-u", "-P", "-s"):
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, os.getcwd())
        return lambda: runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    main = types.ModuleType("__main__")
    vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.argv[:] = arguments
        file = Path(arguments[0]).resolve()
        sys.path.insert(0, str(file.parent))
        vars(main)["__file__"] = str(file)
        code = compile(file.read_text(), str(file), "exec")
    return lambda: exec(code, vars(main))


if __name__ == "__main__":
    sys.exit(_stand_for_it(int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3:]))
