"""Processes that begin with torch imported, forked by a server of this process.

Importing torch and what it imports when it first trains takes seconds: 7.6 on a machine with an
H100. A server (`autofit.probing.fork_server`) does so once, and then forks in milliseconds. It may
be started ahead (`start_server`), to import while this process does something else.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from autofit.probing.fork_server import FORKS
from autofit.probing.process_lifetime import MARK, NO_MARK

_QUIET = {"KINETO_LOG_LEVEL": "6"}  # else torch's profiler announces itself in the last words
# Variables that no library reads: pytest names each test there.
_IGNORED = {"PYTEST_CURRENT_TEST"}
# To fork takes a server milliseconds. One that does not answer within these seconds, or this share
# of the time that is left, is replaced, and what replaces it has the rest to import torch in.
_FORK_S, _SHARE_OF_FORK = 10.0, 0.25
_REAP_S = 10.0  # for what was killed to end
# It keeps messages apart; where there is none, a server does not fork, and gets only one message.
_SOCKET = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_STREAM
_SERVE = """
import gc, json, sys
gc.disable()  # until torch is imported, which leaves nothing to collect and takes a third less
given = json.loads(sys.argv[1])
sys.path[:] = given["sys_path"]
from autofit.probing.fork_server import serve
serve(given["parent"])()
"""


class ServerDied(Exception):
    """A fork server ended instead of serving.

    Attributes:
        returncode: negative for a signal.
        printed: what it printed.
    """

    def __init__(self, returncode: int, printed: bytes) -> None:
        super().__init__(returncode, printed)
        self.returncode = returncode
        self.printed = printed


class ForkedProcess:
    """A process in a session of its own, which prints to a pipe.

    Attributes:
        pid: its process id.
        stdout: what it prints, errors among it.
    """

    def __init__(self, server: ForkServer, pid: int, stdout: IO[bytes], told: IO[str]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._server = server
        self._returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._follow, args=(told,), daemon=True).start()

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status, negative for a signal; None: it has not ended by then."""
        self._ended.wait(timeout)
        return self._returncode

    def _follow(self, told: IO[str]) -> None:
        with told:
            ended = told.readline()
        self._returncode = int(ended) if ended else self._server.wait()
        self._ended.set()


class ForkServer:
    """A process that forks others, which inherit what it inherited when it was started.

    Args:
        connection: to a server that is there already; None: start one.

    Attributes:
        connection: the socket on which it is asked.
        has_imported: whether it is known to have imported torch.
        forks: whether it forks; else it becomes the first process that it is asked for.

    Raises:
        OSError: no process could be started.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.has_imported, self.forks = connection is not None, True
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as it runs
        if connection is None:
            connection, theirs = socket.socketpair(type=_SOCKET)
            with theirs:
                self._process = self._started(theirs)
        self.connection = connection

    def _started(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        given = {"sys_path": _path(), "parent": os.getpid()}
        return subprocess.Popen(
            [sys.executable, *_flags(), "-c", _SERVE, json.dumps(given)],
            stdin=connection.fileno(),
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**_QUIET, **os.environ, MARK: NO_MARK},
        )

    def await_imports(self, seconds: float) -> None:
        """Wait until it has imported torch; a server that does not is killed.

        Raises:
            TimeoutError: it has not in so many seconds.
            ServerDied: it ended instead.
        """
        ends_at = time.monotonic() + seconds
        try:
            self._may_wait(seconds)
            if said := self.connection.recv(1):
                self.has_imported, self.forks = True, said == FORKS
                return
            returncode = self.wait(ends_at - time.monotonic())
        except BaseException:
            self.kill()
            raise
        self._printed.seek(0)
        raise ServerDied(returncode, self._printed.read())

    def _may_wait(self, seconds: float) -> None:
        """Have the connection raise TimeoutError after that; 0 would mean not to wait at all."""
        self.connection.settimeout(max(seconds, 1e-3))

    def run(
        self,
        function: str,
        given: Mapping[str, Any],
        environment: Mapping[str, str],
        inherited: Sequence[int],
        seconds: float,
    ) -> ForkedProcess:
        """Run a function in a process, see `run_forked`.

        Raises:
            ConnectionError: the server has ended.
            TimeoutError: it does not answer.
        """
        self._may_wait(seconds)
        message = {
            "function": function,
            "given": given,
            "environment": {**_QUIET, **environment},
            "descriptors": [1, 2, *inherited],
            "asker": os.getpid(),
            "sys_path": _path(),
            "argv": sys.argv[:1],
        }
        stdout, write = pipe()
        told, tell = pipe()
        try:
            self._send(message, (tell, write, write, *inherited))
        except BaseException:
            os.close(stdout)
            os.close(told)
            raise
        finally:
            os.close(write)
            os.close(tell)
        output, answers = os.fdopen(stdout, "rb", 0), os.fdopen(told)
        try:
            return ForkedProcess(self, _pid_told(answers, seconds), output, answers)
        except BaseException:
            output.close()
            answers.close()
            raise

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))  # it may have been removed
        try:
            with tempfile.TemporaryFile() as written:
                written.write(json.dumps(message).encode())
                written.flush()
                sent = [written.fileno(), folder, *descriptors]
                socket.send_fds(self.connection, [b"."], sent)
        finally:
            os.close(folder)

    @property
    def has_ended(self) -> bool:
        """Whether this process started it, and it has ended."""
        return self._process is not None and self._process.poll() is not None

    def wait(self, seconds: float | None = None) -> int:
        """Wait until it has ended, and return its exit status.

        Raises:
            TimeoutError: it has not in so many seconds.
        """
        if self._process is None:
            return -signal.SIGKILL
        try:
            return self._process.wait(None if seconds is None else max(seconds, 0.0))
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error

    def kill(self) -> None:
        """End it, and with it what it forked."""
        self.connection.close()
        self._printed.close()
        if self._process is not None:
            self._process.kill()
            with suppress(TimeoutError):  # it is inside a call of a driver or a file system
                self.wait(_REAP_S)


def start_server() -> None:
    """Have a server import torch beside what this process does until it runs a function.

    Where it cannot be started, `run_forked` says so.
    """
    with _servers_locked(math.inf), suppress(OSError):
        _forget_ended()
        if (around := surroundings()) not in _servers:
            _servers[around] = ForkServer()


def run_forked(
    function: str,
    given: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
    seconds: float,
) -> ForkedProcess:
    """Run a function in a process that has imported torch.

    Args:
        function: "module:name" of it; it gets the process id of its parent, which is not this
            process, and what is given.
        given: can be written as JSON.
        environment: of the process.
        inherited: descriptors that the process keeps, by the same numbers.
        seconds: within which it starts.

    Raises:
        OSError: no process could be started.
        ServerDied: the one that imports torch ended.
        TimeoutError: it has not imported torch in time.
    """
    ends_at = time.monotonic() + seconds
    with _servers_locked(seconds):
        around, asked = surroundings(), (function, given, environment, inherited)
        server = _servers.pop(around, None)
        process: ForkedProcess | None = None
        _end_unused()
        if server is not None:
            try:
                if not server.has_imported:
                    server.await_imports(ends_at - time.monotonic())
                fork_s = min(_FORK_S, (ends_at - time.monotonic()) * _SHARE_OF_FORK)
                process = server.run(*asked, fork_s)
            # It had nothing to do and has ended, or hangs; or died amid its imports, as another may
            except (ConnectionError, TimeoutError, ServerDied):
                server.kill()
        if server is None or process is None:
            _forget_ended()
            server = ForkServer()
            server.await_imports(ends_at - time.monotonic())
            process = server.run(*asked, ends_at - time.monotonic())
        if server.forks:
            _servers[around] = server
    return process


def _pid_told(answers: IO[str], seconds: float) -> int:
    waiting = select.poll()
    waiting.register(answers, select.POLLIN)
    if not waiting.poll(1000 * max(seconds, 0)):
        raise TimeoutError
    pid = int(answers.readline() or 0)
    if pid <= 0:  # it was killed before it could tell
        raise ConnectionError("the fork server has ended")
    return pid


_servers: dict[tuple[Any, ...], ForkServer] = {}
_lock = threading.Lock()


@contextmanager
def _servers_locked(seconds: float) -> Iterator[None]:
    if not _lock.acquire(timeout=-1 if seconds == math.inf else max(seconds, 0)):
        raise TimeoutError
    try:
        yield
    finally:
        _lock.release()


def surroundings() -> tuple[Any, ...]:
    """Return what a process inherits from this one, or reads when it imports its libraries."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    limits = [
        resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    ]
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    items = sorted(os.environ.items())
    environment = [item for item in items if item[0] not in _IGNORED and not _is_torchs(*item)]
    return (sys.executable, *_flags(), niceness, *sorted(cores), *limits, *environment)


def _is_torchs(name: str, value: str) -> bool:
    """Return whether a variable is what torch makes of an environment without it.

    It writes where compiled code is kept when it makes the first optimizer; a server does so too.
    """
    folder, name_there = os.path.split(value)
    is_own = name_there.startswith("torchinductor_") and folder == tempfile.gettempdir()
    return name == "TORCHINDUCTOR_CACHE_DIR" and is_own


def adopt(server: ForkServer) -> None:
    """Have a server of another process fork what this process asks for."""
    _servers[surroundings()] = server


def _end_unused() -> None:
    """End servers that were started ahead in surroundings that have changed since."""
    for around, server in [*_servers.items()]:
        if not server.has_imported:
            _servers.pop(around).kill()


def _forget_ended() -> None:
    """Reap servers that have ended, in whose surroundings nothing was started since."""
    for around, server in [*_servers.items()]:
        if server.has_ended:
            _servers.pop(around).kill()


def _forget_servers() -> None:
    """Leave the servers of the parent to it, in a fork of this process."""
    global _lock
    _lock = threading.Lock()
    _of_parents.append(_servers.copy())
    _servers.clear()


_of_parents: list[
    dict[tuple[Any, ...], ForkServer]
] = []  # a Popen that is dropped waits for its process


def _end_servers() -> None:
    for server in _servers.values():
        server.kill()


os.register_at_fork(after_in_child=_forget_servers)
atexit.register(_end_servers)


def _flags() -> list[str]:
    """Return Python's options for a server: those of this process, as `multiprocessing` does.

    -P keeps the current directory off the path, where any json.py would be run; -u, because the
    last words of a worker count.
    """
    return ["-u", "-P", *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]  # typeshed lacks it


def _path() -> list[str]:
    """Return where modules are found, for imports by name to mean the same in another process."""
    return [path for path in sys.path if isinstance(path, str)]  # Python ignores what is no text


def beyond_standard(descriptor: int) -> int:
    """Move a descriptor that a process inherits past 0 to 2, its standard streams, if need be.

    It got such a number where this process was started with a standard stream closed.
    """
    if descriptor > 2:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def pipe() -> tuple[int, int]:
    """Return the two ends of a pipe, for reading and for writing."""
    read, write = os.pipe()
    return beyond_standard(read), beyond_standard(write)
