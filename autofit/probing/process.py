"""A worker process as its parent sees it: started, asked, listened to, killed when it must be."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

from autofit.errors import WorkerFailed
from autofit.probing.payload import environment_of_parent
from autofit.probing.wire import send

_BOOTSTRAP = """
import json, sys
told = json.loads(sys.argv[1])
sys.path[:] = told["sys_path"]
sys.argv[:] = [told["argv0"]]
from autofit.probing.worker import main
main(*told["main"])
"""
_TAIL_LINES = 200
_REAP_SECONDS = 10.0


class WorkerGone(Exception):
    """The worker ended before it answered; `returncode` is negative for a signal."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(returncode)
        self.returncode = returncode


class WorkerSilent(Exception):
    """The worker did not answer in time."""


class WorkerProcess:
    """One child process in a session of its own, with pipes for requests, replies and its life."""

    def __init__(self) -> None:
        requests_read, requests_write = os.pipe()
        replies_read, replies_write = os.pipe()
        lifeline_read, self._lifeline = os.pipe()
        inherited = (requests_read, replies_write, lifeline_read)
        told = environment_of_parent() | {"main": [os.getpid(), *inherited]}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise WorkerFailed(f"the worker process could not be started: {error}") from error
        finally:
            for descriptor in inherited:
                os.close(descriptor)
        self._requests = os.fdopen(requests_write, "w")
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._readers = [
            _reader(os.fdopen(replies_read), self._replies.put),
            _reader(self._process.stdout, self._keep),
        ]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for the reply.

        Raises:
            WorkerGone: it ended instead.
            WorkerSilent: it did not answer in time.
        """
        try:
            send(self._requests, message)
        except (BrokenPipeError, ValueError):
            raise WorkerGone(self._reap()) from None
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise WorkerSilent from None
        if line is None:
            raise WorkerGone(self._reap())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def tail(self, lines: int = 20) -> str:
        """The last lines it printed."""
        return "".join(list(self._tail)[-lines:]).strip()

    def kill(self) -> None:
        """End its whole process group at once, and wait for it (within bounds)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reap()
        self._close_pipes()

    def _reap(self) -> int | None:
        try:
            return self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:  # in an uninterruptible call of the driver: leave it
            return None

    def _close_pipes(self) -> None:
        with contextlib.suppress(OSError):
            self._requests.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        for reader in self._readers:
            reader.join(_REAP_SECONDS)

    def _keep(self, line: str | None) -> None:
        if line is not None:
            self._tail.append(line[:2000])


def _reader(stream: IO[str] | None, take: Any) -> threading.Thread:
    """A thread that hands on each line, then None at the end."""

    def read() -> None:
        assert stream is not None  # it was asked for as a pipe
        with stream:
            for line in stream:
                take(line)
        take(None)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread
