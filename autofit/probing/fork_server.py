"""A process that has imported torch, and forks processes, which need not import it again.

Importing torch and what it imports when it first trains takes seconds: 7.6 on a machine with an
H100. The server does so once, beside what this process does meanwhile (`start_server`), and then
forks in milliseconds. It holds no device and runs nothing of the user's, and what it forked does
not depend on it.

The server of `multiprocessing` is not used, because it is one for the whole process:

- It keeps the environment of its first start, also for variables that torch reads at import.
- It may be the user's own, and its state would change.
- A daemonic process, such as a worker of Dask, may not use it.
- It looks for modules in the current folder, and prints to the user's streams.
- One that hangs, or dies as it imports, is not replaced, and its output does not say why.

So there is one server for each set of surroundings, on `multiprocessing`'s connections and
processes. `tests/probing/test_fork_server.py` and `test_worker_surroundings.py` show each of these.
"""

from __future__ import annotations

import atexit
import ctypes
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
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from typing import Any

# A server without forks ends so long after the last request: between two, a search takes less.
IDLE_S = 60.0
_REAP_S = 10.0  # for a process that was killed to end
# The first is what making an optimizer imports.
_PRELOADED = (
    "torch._dynamo",
    "autofit.probing.worker",
    "autofit.probing.supervisor",
    "autofit.probing.looks",
    "autofit.probing.prober",
)
_MAX_DESCRIPTORS, _MAX_NAME_BYTES = 16, 256  # of a request
# Else torch's profiler announces itself in a worker's output: it reads this when it is first used.
QUIET = {"KINETO_LOG_LEVEL": "6"}
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # as -u, where a worker is no fork
# Variables that no library reads as it is imported. pytest names each test in the first; torch
# writes the second when it makes the first optimizer, and reads it when it compiles.
_IGNORED = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SERVE = """
import gc, json, sys
gc.disable()  # until torch is imported, which leaves nothing to collect and takes a third less
given = json.loads(sys.argv[1])
sys.path[:] = given["sys_path"]
from autofit.probing.fork_server import serve
serve(given["parent"])
"""


class ForkServer:
    """A server that this process started; it begins to import torch at once.

    Attributes:
        requests: takes the name of a function, and descriptors for it.
        has_forked: whether it is known to have forked, and so to have imported torch.

    Raises:
        OSError: no process could be started.
    """

    def __init__(self) -> None:
        self.has_forked, self._ending = False, threading.Lock()
        with beyond_standard_streams():
            self.requests, theirs = socket.socketpair()
            self._output = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as it runs
        closed_in_forks(self.requests)
        given = json.dumps({"sys_path": import_path(), "parent": os.getpid()})
        try:
            with theirs:
                self._process = subprocess.Popen(
                    # -u, because output counts that a crash would lose; -P keeps the current folder
                    # off the path, where any json.py would be run
                    [sys.executable, "-u", "-P", *_flags(), "-c", _SERVE, given],
                    stdin=theirs.fileno(),
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # no session: see `supervisor._work`
                    cwd=_folder(),
                    env={**QUIET, **os.environ, **_UNBUFFERED},
                )
        except BaseException:
            self.requests.close()
            self._output.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether it is known to fork no more."""
        return self.requests.fileno() < 0 or self._process.poll() is not None

    def end(self, grace_s: float = 0.0) -> tuple[int, bytes]:
        """End it, where it does not end by itself in time; what it forked goes on.

        Several threads may have waited for it.

        Args:
            grace_s: seconds within which it may end by itself.

        Returns:
            Its exit status, and what it printed.
        """
        with self._ending:
            self.requests.close()
            for seconds in (grace_s, _REAP_S):
                with suppress(subprocess.TimeoutExpired):  # it is inside a call of a file system
                    self._process.wait(seconds)
                    break
                self._process.kill()
            if not self._output.closed:
                self._output.seek(0)
                self._printed = self._output.read()
                self._output.close()
            returncode = self._process.returncode
            return -signal.SIGKILL if returncode is None else returncode, self._printed


_servers: dict[tuple[Any, ...], ForkServer] = {}
_lock = threading.Lock()


def start_server() -> None:
    """Have a server import torch while this process does other work.

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
    descriptors = [each.fileno() for each in given]
    with _lock:
        for is_last in (False, True):
            server = _server_here()
            try:
                socket.send_fds(server.requests, [function.encode()], descriptors)
                break
            except ConnectionError:  # it had nothing to do, and is ending
                server.end()
                if is_last:
                    raise
    return server


def _server_here() -> ForkServer:
    """Return the server for this environment; end one that was started for another."""
    around = surroundings()
    for other, server in [*_servers.items()]:
        if server.has_ended or (other != around and not server.has_forked):
            _servers.pop(other).end()
    if around not in _servers:
        _servers[around] = ForkServer()
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
    environment = [item for item in items if item[0] not in _IGNORED]
    return (sys.executable, *_flags(), niceness, *sorted(cores), *limits, *environment)


def _folder() -> str | None:
    """Return where a process starts; None: here, unless this folder was removed.

    MKL finds no libraries of torch there.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def _flags() -> list[str]:
    """Return the options of this Python, as `multiprocessing` passes them on."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]  # typeshed lacks it


def import_path() -> list[str]:
    """Return where modules are found, for imports by name to mean the same in another process."""
    return [path for path in sys.path if isinstance(path, str)]  # Python ignores what is no text


@contextmanager
def beyond_standard_streams() -> Iterator[None]:
    """Keep files opened inside from taking a standard stream's number, as one may be closed.

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
    """Have forks of this process close these, by which another process sees that it is alive."""
    _ends.update(ends)


_ends: weakref.WeakSet[Connection | socket.socket] = weakref.WeakSet()
_of_parents: list[ForkServer] = []  # a Popen that is dropped waits for its process


def _leave_to_parent() -> None:
    """In a fork of this process, close what belongs to the parent."""
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


# In the server, and in what it forks.


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
            asked = socket.recv_fds(requests, _MAX_NAME_BYTES, _MAX_DESCRIPTORS)
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


def die_with_parent(parent_pid: int) -> None:
    """End this process with the thread that started it, however that ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


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
