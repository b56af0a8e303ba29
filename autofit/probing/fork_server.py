"""A process that has imported torch, and forks processes, which need not import it again.

Importing torch and what it imports when it first trains takes seconds: 7.6 on a machine with an
H100. The server does so once, beside what this process does meanwhile (`start_server`), and then
forks in milliseconds. It holds no device and runs nothing of the user's, and what it forked does
not depend on it.

`multiprocessing` has one such server for the whole process. It keeps the environment of its first
start, also for variables that torch reads as it is imported; it looks for modules in the current
folder and prints to the user's streams; it may be the user's own; and a process of a daemon, such
as a worker of Dask, may not use it. Here is one for each set of surroundings, on the connections
and processes of `multiprocessing`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from typing import IO, Any

from autofit.probing.process_lifetime import die_with_parent, outlive_parent

# A server without forks ends so long after the last request: between two, a search takes less.
IDLE_S = 60.0
_REAP_S = 10.0  # for a process that was killed to end
# The first is what making an optimizer imports.
_PRELOADED = (
    "torch._dynamo",
    "autofit.probing.worker",
    "autofit.probing.supervisor",
    "autofit.probing.survey",
    "autofit.probing.prober",
)
_MOST_DESCRIPTORS, _MOST_NAME_BYTES = 16, 256  # of a request
# Else torch's profiler announces itself in the last words: it reads this when it is first used.
QUIET = {"KINETO_LOG_LEVEL": "6"}
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # as -u, where a worker is no fork
# Variables that no library reads: pytest names each test there.
_IGNORED = {"PYTEST_CURRENT_TEST"}
_SERVE = """
import gc, json, sys
gc.disable()  # until torch is imported, which leaves nothing to collect and takes a third less
given = json.loads(sys.argv[1])
sys.path[:] = given["sys_path"]
from autofit.probing.fork_server import serve
serve(given["parent"])
"""


@dataclass(eq=False)
class ForkServer:
    """A server of this process, or one that it shares.

    Attributes:
        requests: takes the name of a function, and descriptors for it.
        process: the server, if this process started it.
        printed: what it prints.
        has_forked: whether it is known to have forked, and so to have imported torch.
        last_words: what it had printed when it ended.
    """

    requests: socket.socket
    process: subprocess.Popen[bytes] | None = None
    printed: IO[bytes] | None = None
    has_forked: bool = False
    last_words: bytes = b""
    _ending: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def started(cls) -> ForkServer:
        """Start one, which begins to import torch.

        Raises:
            OSError: no process could be started.
        """
        with beyond_standard_streams():
            requests, theirs = socket.socketpair()
            printed = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as it runs
        closed_in_forks(requests)
        given = json.dumps({"sys_path": import_path(), "parent": os.getpid()})
        try:
            with theirs:
                process = subprocess.Popen(
                    # -u, because the last words of a worker count; -P keeps the current folder off
                    # the path, where any json.py would be run
                    [sys.executable, "-u", "-P", *_flags(), "-c", _SERVE, given],
                    stdin=theirs.fileno(),
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**QUIET, **os.environ, **_UNBUFFERED},
                )
        except BaseException:
            requests.close()
            printed.close()
            raise
        return cls(requests, process, printed)

    @property
    def has_ended(self) -> bool:
        """Whether it is known to fork no more."""
        is_closed = self.requests.fileno() < 0
        return is_closed or (self.process is not None and self.process.poll() is not None)

    def asked(self, function: str, given: Sequence[Connection]) -> ForkServer:
        """Ask for a process, as `run_forked` does."""
        descriptors = [each.fileno() for each in given]
        socket.send_fds(self.requests, [function.encode()], descriptors)
        return self

    def death(self) -> tuple[int, bytes]:
        """Return the exit status of a server that is ending, and what it printed."""
        returncode = -signal.SIGKILL
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                returncode = self.process.wait(_REAP_S)
        self.end()
        return returncode, self.last_words

    def end(self) -> None:
        """End it; what it forked goes on. Several threads may have waited for it."""
        with self._ending:
            self.requests.close()
            if self.process is None or self.printed is None or self.printed.closed:
                return
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # it is inside a call of a file system
                self.process.wait(_REAP_S)
            self.printed.seek(0)
            self.last_words = self.printed.read()
            self.printed.close()


_servers: dict[tuple[Any, ...], ForkServer] = {}
_lock = threading.Lock()


def start_server() -> None:
    """Have a server import torch beside what this process does until it runs a function.

    Where it cannot be started, `run_forked` says so.
    """
    with _lock, suppress(OSError):
        _server_here()


def run_forked(function: str, given: Sequence[Connection]) -> ForkServer:
    """Have a function run in a process that has imported torch; return the server that forks it.

    The process ends with the function. It keeps the standard streams of the server, which forks it
    as soon as it has imported torch.

    Args:
        function: "module:name" of it.
        given: its arguments, which it gets as copies.

    Raises:
        OSError: no process could be started.
    """
    with _lock:
        try:
            return _server_here().asked(function, given)
        except ConnectionError:  # it had nothing to do, and is ending
            _servers[surroundings()].end()
            return _server_here().asked(function, given)


def _server_here() -> ForkServer:
    """Return the server of these surroundings; what was started ahead in others is ended."""
    around = surroundings()
    for other, server in [*_servers.items()]:
        if server.has_ended or (other != around and not server.has_forked):
            _servers.pop(other).end()
    if around not in _servers:
        _servers[around] = ForkServer.started()
    return _servers[around]


def surroundings() -> tuple[Any, ...]:
    """Return what a process inherits from this one, or reads when it imports its libraries."""
    limits = [
        resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    ]
    cores, niceness = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
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


def _flags() -> list[str]:
    """Return the options of this Python, as `multiprocessing` passes them on."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]  # typeshed lacks it


def import_path() -> list[str]:
    """Return where modules are found, for imports by name to mean the same in another process."""
    return [path for path in sys.path if isinstance(path, str)]  # Python ignores what is no text


@contextmanager
def beyond_standard_streams() -> Iterator[None]:
    """Have what is opened inside get no number of a standard stream, any of which may be closed.

    What libraries print would be written to it.
    """
    taken = [os.open(os.devnull, os.O_RDWR)]
    try:
        while taken[-1] <= 2:
            taken.append(os.open(os.devnull, os.O_RDWR))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def closed_in_forks(*ends: Connection | socket.socket) -> None:
    """Have forks of this process let go of these, by which another process knows that it lives."""
    _ends.update(ends)


_ends: weakref.WeakSet[Connection | socket.socket] = weakref.WeakSet()
_of_parents: list[ForkServer] = []  # a Popen that is dropped waits for its process


def _leave_to_parent() -> None:
    """Leave to the parent what is the parent's, in a fork of this process."""
    global _lock
    _lock = threading.Lock()
    for end in _ends:
        end.close()
    _of_parents.extend(_servers.values())
    _servers.clear()


def _end_all() -> None:
    for server in _servers.values():
        server.end()


os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(_end_all)


# In the server.


def serve(parent_pid: int) -> None:
    """Fork for whoever asks on standard input, a socket, until nobody can ask any more."""
    die_with_parent(parent_pid)  # in whose stead an import that hangs would live on
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, statuses of children would be lost
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # blocked, no end of a worker would be noticed
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in _PRELOADED:
        importlib.import_module(name)
    outlive_parent()  # which is a thread that may end, and is known by the socket from now on
    gc.freeze()  # pages that no collection writes to stay shared
    os.register_at_fork(after_in_child=requests.close)
    requests.settimeout(IDLE_S)
    processes = processes_here()
    while True:
        try:
            asked = socket.recv_fds(requests, _MOST_NAME_BYTES, _MOST_DESCRIPTORS)
        except TimeoutError:
            if multiprocessing.active_children():
                continue
            break
        if not asked[0]:
            break
        given = [Connection(each) for each in asked[1]]
        processes.Process(target=_run, args=(asked[0].decode(), given)).start()
        for each in given:
            each.close()
    os._exit(0)


def processes_here() -> ForkContext | SpawnContext:
    """Return how this process may start another: by a fork, where all its threads are in it.

    The threads of numpy's linear algebra end at a fork, and come back when they are needed.
    """
    with warnings.catch_warnings(action="ignore"):  # Python's own, of threads at a fork
        if (pid := os.fork()) == 0:
            os._exit(0)
    os.waitpid(pid, 0)
    has_one_thread = len(os.listdir("/proc/self/task")) == 1
    return get_context("fork") if has_one_thread else get_context("spawn")


def _run(function: str, given: Sequence[Connection]) -> None:
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*given)
