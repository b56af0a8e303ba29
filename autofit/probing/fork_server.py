"""A process that has imported torch, and forks processes, which need not import it again.

It holds no device and has one thread. It watches over what it forks: a fork ends with the process
that asked for it, however that ends, and the server with the process that started it.

Where a fork would be unsafe, since something imported keeps a thread, or could not be watched,
the server becomes the process that was asked for, which ends with the thread that asked.
`autofit.probing.forked_process` has the other end of the connection.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autofit.probing.process_lifetime import MARK, NO_MARK, die_with_thread, outlive_thread

# A server without forks ends so long after the last request: between two, a search takes less.
IDLE_S = 60.0
# What a server says once it has imported torch.
FORKS, BECOMES = b"f", b"b"
_MOST_DESCRIPTORS = 64  # of a request: a worker's has about ten
# The first is what making an optimizer imports.
_PRELOADED = ("torch._dynamo", "autofit.probing.worker")
Program = Callable[[], object]


@dataclass(frozen=True)
class _Request:
    """Run a function in a process.

    Attributes:
        message: what `autofit.probing.forked_process` has written.
        folder: a descriptor of the folder to work in.
        tell: a descriptor that gets the process id and later the exit status, a line each.
        others: descriptors that the process keeps; `message["descriptors"]` are their numbers.
    """

    message: Mapping[str, Any]
    folder: int
    tell: int
    others: list[int]


@dataclass
class _Child:
    """A fork.

    Attributes:
        pid: its process id.
        itself, asker: descriptors of processes: of the fork, and of the one that asked for it.
        tell: see `_Request`.
        is_killed: whether it was killed for its asker's end.
    """

    pid: int
    itself: int
    asker: int
    tell: int
    is_killed: bool = False

    def kill(self) -> None:
        self.is_killed = True
        os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        _tell(self.tell, os.waitstatus_to_exitcode(status))
        self.close()

    def close(self) -> None:
        for each in (self.itself, self.asker, self.tell):
            os.close(each)


def serve(parent_pid: int) -> Program:
    """Serve on standard input, a socket; return what this process, perhaps a fork, runs next.

    Args:
        parent_pid: the process with which it ends.
    """
    die_with_thread(parent_pid)  # which waits meanwhile
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, statuses of children were lost
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in _PRELOADED:
        importlib.import_module(name)
    outlive_thread()
    _mark_address()
    gc.freeze()  # pages that no collection writes to stay shared
    forks = _can_fork()
    with connection:
        connection.sendall(FORKS if forks else BECOMES)
        if forks:
            return _serve(connection, parent_pid)
        request = _received(connection)
    if request is None:
        return _nothing
    return functools.partial(_become, request, parent_pid)


def _nothing() -> None:
    """The program of a server that nobody can ask any more: it ends."""


def _can_fork() -> bool:
    """Return whether a fork has all threads of this process, its only one, and can be watched.

    The threads of numpy's linear algebra end at a fork, and come back when they are needed. Linux
    has descriptors of processes from 5.3 on, and some sandboxes refuse them.
    """
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _serve(connection: socket.socket, parent_pid: int) -> Program:
    """Fork until nobody can ask any more and all forks have ended."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return _nothing
    children: list[_Child] = []
    asked_on: list[Any] = [connection]
    while asked_on or children:
        ready = _await([parent, *asked_on], children)
        if not ready:
            connection.shutdown(socket.SHUT_RD)  # what was sent before can still be read
        for child in [*children]:
            if child.itself in ready:
                child.reap()
                children.remove(child)
            elif parent in ready or child.asker in ready:
                child.kill()
        if parent in ready:
            return _nothing
        if connection in ready:
            request = _received(connection)
            if request is None:
                asked_on.clear()
            elif (forked := _forked(request)) is None:
                os.close(parent)
                for child in children:
                    child.close()
                return functools.partial(_become, request, os.getppid())
            else:
                children.append(forked)
    return _nothing


def _await(others: Sequence[Any], children: Sequence[_Child]) -> list[Any]:
    """Return what has ended, or can be read from; nothing after a time without children."""
    processes = [child.itself for child in children]
    askers = [child.asker for child in children if not child.is_killed]
    return select.select([*others, *processes, *askers], [], [], None if children else IDLE_S)[0]


def _forked(request: _Request) -> _Child | None:
    """Fork; None: this process is the fork."""
    pid = os.fork()
    if pid == 0:
        os.setsid()  # before anybody knows of it, and kills it as a group
        return None
    for each in (request.folder, *request.others):
        os.close(each)
    itself, asker = os.pidfd_open(pid), _handle(request.message["asker"], pid)
    return _Child(pid, itself, asker, request.tell)


def _handle(pid: int, otherwise: int) -> int:
    """Return a descriptor of a process, or of another where it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(otherwise, signal.SIGKILL)
        return os.pidfd_open(otherwise)


def _received(connection: socket.socket) -> _Request | None:
    """Return the next request; None: there will be none."""
    said, descriptors, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
    if not said:
        return None
    written, folder, tell, *others = descriptors
    with os.fdopen(written, "rb") as file:
        file.seek(0)
        return _Request(json.load(file), folder, tell, others)


def _tell(descriptor: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody wants to know any more
        os.write(descriptor, b"%d\n" % number)


# In the process that was asked for.


def _become(request: _Request, parent_pid: int) -> None:
    """Take the surroundings that are asked for, and run the function."""
    message = request.message
    _tell(request.tell, os.getpid())
    with suppress(PermissionError):  # the asker may not enter its own folder
        os.fchdir(request.folder)
    os.close(request.folder)
    os.close(request.tell)
    _place(request.others, message["descriptors"])
    _set_environment(message["environment"])
    sys.path[:], sys.argv[:] = message["sys_path"], message["argv"]
    module, _, name = message["function"].partition(":")
    getattr(importlib.import_module(module), name)(parent_pid, **message["given"])


def _set_environment(environment: Mapping[str, str]) -> None:
    """Also where /proc shows it, as far as a worker is looked for there: by its mark."""
    if mark := environment.get(MARK):
        ctypes.memmove(_mark_address(), mark.encode(), len(NO_MARK))
    os.environ.clear()
    os.environ.update(environment)


@functools.cache  # first called while the variable is in the environment
def _mark_address() -> int:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    address: int = getenv(MARK.encode())
    return address


def _place(descriptors: list[int], wanted: list[int]) -> None:
    """Give each descriptor the number that it has in the process that asks."""
    above = max(wanted) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for source, target in zip(moved, wanted, strict=True):
        os.dup2(source, target)
        os.close(source)
