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
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from autofit.errors import WorkerFailed
from autofit.interrupts import interrupts_deferred
from autofit.probing.messages import STACK_SIGNAL, reply_to, send
from autofit.probing.process_lifetime import kill_marked, new_mark

_BOOTSTRAP = """
import json, sys
told = json.loads(sys.argv[1])
sys.path[:] = told["sys_path"]
sys.argv[:] = [told["argv0"]]
from autofit.probing.process_lifetime import die_with_parent
die_with_parent(*told["lifeline"])  # before torch is imported, which takes seconds
from autofit.probing.worker import main
main(*told["pipes"])
"""
_TAIL_BYTES = 64 * 2**10
_REAP_SECONDS = 10.0
_STACK_SECONDS = 2.0
_STACK_LINES = 12
_STACK_MARK = b"(most recent call first):"


class WorkerGone(Exception):
    """The worker ended before it answered; `returncode` is negative for a signal."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(returncode)
        self.returncode = returncode


class WorkerSilent(Exception):
    """The worker did not answer in time; `stack` is where it was, as far as it could say."""

    def __init__(self, stack: str) -> None:
        super().__init__(stack)
        self.stack = stack


class WorkerProcess:
    """One child process in a session of its own, with pipes for requests, replies and its life.

    Args:
        payload: descriptor of a file that the worker may open as `/dev/fd/N`; None: none.

    Raises:
        WorkerFailed: it could not be started.
    """

    def __init__(self, payload: int | None = None) -> None:
        requests_read, requests_write = os.pipe()
        replies_read, replies_write = os.pipe()
        lifeline_read, self._lifeline = os.pipe()
        inherited = (requests_read, replies_write, lifeline_read)
        told = _environment_of_parent() | {
            "lifeline": [os.getpid(), lifeline_read],
            "pipes": [requests_read, replies_write],
        }
        self._mark = new_mark()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOTSTRAP, json.dumps(told)],  # last words count
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=inherited if payload is None else (*inherited, payload),
                start_new_session=True,
                env=os.environ | self._mark,
            )
        except OSError as error:
            for descriptor in (requests_write, replies_read, self._lifeline):
                os.close(descriptor)
            raise WorkerFailed(f"the worker process could not be started: {error}") from error
        finally:
            for descriptor in inherited:
                os.close(descriptor)
        self._requests = os.fdopen(requests_write, "w")
        self._answers = os.fdopen(replies_read, errors="replace")
        self._asked = 0
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._tail = b""
        self._listener = _thread(self._listen)
        self._threads = [self._listener, _thread(self._drain), _thread(self._watch)]

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
        self._asked += 1
        try:
            send(self._requests, {**message, "number": self._asked})
            reply = self._reply(timeout_s)
        except (BrokenPipeError, ValueError):
            reply = None
        except queue.Empty:
            raise WorkerSilent(self._stack()) from None
        if reply is None:
            raise WorkerGone(self._reap())
        return reply

    def _reply(self, timeout_s: float) -> dict[str, Any] | None:
        """The reply to what was asked last, past anything else on the pipe; None: it ended."""
        end = time.monotonic() + timeout_s
        while (line := self._replies.get(timeout=max(end - time.monotonic(), 0.0))) is not None:
            if (reply := reply_to(self._asked, line)) is not None:
                return reply
        return None

    def tail(self, lines: int = 20) -> str:
        """The last lines it printed."""
        return _last_lines(self._tail, lines)

    def last_words(self) -> str:
        """Where it crashed, where Python could still say so; else its last lines."""
        before, mark, stack = self._tail.rpartition(_STACK_MARK)
        if not mark:
            return self.tail(5)
        error = _last_lines(before.rpartition(b"\n")[0], 1)
        return f"{error}\n{_first_lines(stack)}"

    def kill(self) -> None:
        """End it and all that it started at once, and wait for it (within bounds)."""
        with interrupts_deferred():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            kill_marked(self._mark)
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
        for thread in self._threads:
            thread.join(1.0)

    def _stack(self) -> str:
        """Where the worker hangs: it prints its stack at a signal, even when Python is stuck."""
        before = self._tail
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, STACK_SIGNAL)
        end = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < end:
            time.sleep(0.1)
            _, mark, stack = self._tail.rpartition(_STACK_MARK)
            if mark and self._tail != before:
                return _first_lines(stack)
        return "it did not say where: it is stopped, or inside a call of the driver"

    def _listen(self) -> None:
        with self._answers:
            for line in self._answers:
                self._replies.put(line)
        self._replies.put(None)

    def _drain(self) -> None:
        """Keep the end of what it prints, however much that is and however long its lines."""
        output: IO[bytes] | None = self._process.stdout
        assert output is not None  # it was asked for as a pipe
        with output:
            while chunk := os.read(output.fileno(), _TAIL_BYTES):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def _watch(self) -> None:
        """Its end is known even where a child of its own still holds the pipes open."""
        self._process.wait()
        self._listener.join(1.0)
        self._replies.put(None)


def _environment_of_parent() -> dict[str, Any]:
    """What the worker must share with the parent for imports by name to mean the same."""
    return {"sys_path": list(sys.path), "argv0": sys.argv[0] if sys.argv else ""}


def _thread(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _first_lines(stack: bytes) -> str:
    return "\n".join(stack.decode(errors="replace").strip("\n").splitlines()[:_STACK_LINES])


def _last_lines(output: bytes, lines: int) -> str:
    text = output.decode(errors="replace").strip()
    return "\n".join(line[:2000] for line in text.splitlines()[-lines:])
