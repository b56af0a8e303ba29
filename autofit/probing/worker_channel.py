"""A channel to a worker process, as the parent sees it: started, asked, killed when it must be."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, NoReturn

from autofit.errors import InvalidArgument, SearchTimedOut, WorkerFailed, mark_users
from autofit.interrupts import interrupts_deferred
from autofit.measurement import Outcome
from autofit.probing.fork_server import (
    ForkServer,
    beyond_standard_streams,
    closed_in_forks,
    run_forked,
)
from autofit.probing.requests import (
    QUIET_S,
    STACK_SIGNAL,
    STILL_RUNNING,
    Deadline,
    DeviceFacts,
    NoReply,
    OnStage,
    Opening,
    Reply,
    Request,
    ignore_stage,
)
from autofit.probing.serialization import Payload, nameless_file, write_payload
from autofit.probing.wire import message_of_request, reply_of
from autofit.strategy import ALONE, Strategy, World
from autofit.training.workload import Workload
from autofit.units import format_seconds

# For a worker to import torch and open the device.
START_TIMEOUT_S = 120.0


class WorkerChannel:
    """A channel to a worker process; implements `autofit.probing.requests.Channel`.

    Args:
        workload: what is trained; this process only writes it to a file.
        strategies: those that may have settings in a plan.
        device: "cuda", "cuda:1", "cpu" or None: cuda where there is one.
        seed: for everything random.
        world: the ranks that train together, of which the worker is one.
        threads: that torch computes with in the worker; None: as many as here.

    Attributes:
        payload: path of the workload's file, which vanishes with the channel.
        process: the worker; None where none was started.

    Raises:
        InvalidArgument: the workload cannot be pickled.
        WorkerFailed: there is no room for the workload's file.
    """

    def __init__(
        self,
        workload: Workload,
        strategies: Sequence[Strategy] = (),
        *,
        device: str | None = None,
        seed: int = 0,
        world: World = ALONE,
        threads: int | None = None,
    ) -> None:
        self.process: WorkerProcess | None = None
        self._drops = 0
        self._device: DeviceFacts | None = None
        self._strategies = strategies
        self._files = [nameless_file()]
        self.payload, loader = path_of(self._files[0]), None
        name = str(device) if device else None  # a torch.device takes torch to be read
        self._opening = partial(Opening, self.payload, name, seed, world, threads)
        try:
            if workload.loader is not None:
                self._files.append(nameless_file())
                loader = path_of(self._files[1])
            write_payload(Payload(workload, strategies), self.payload, loader)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None where there is none now."""
        is_there = self.process is not None and not self.process.has_ended
        return self.process.pid if is_there and self.process is not None else None

    def open(self, ends_at: float = math.inf) -> DeviceFacts:
        """Start a worker where there is none, and have it open the device."""
        if self.pid is None or self._device is None:
            opened = self._started(ends_at)
            if opened.exception is not None:
                self.drop()
                self._refuse(opened.exception)
            self._device = opened.value
        assert self._device is not None  # as above
        return self._device

    def _started(self, ends_at: float, *, may_repeat: bool = True) -> Reply:
        """Start a worker and return what it says of the device; a death may be transient."""
        deadline, drops = Deadline.after(START_TIMEOUT_S, ends_at), self._drops
        try:
            process = self.process = WorkerProcess(deadline)
            if self._drops != drops:  # by another thread, which found none to end
                self.drop()
            return reply_of(process.ask(pickle.dumps(self._opening()), deadline))
        except NoReply as lost:
            if may_repeat and lost.outcome is not Outcome.TIMEOUT and self._drops == drops:
                return self._started(ends_at, may_repeat=False)
            raise WorkerFailed(lost.detail) from None

    def _refuse(self, error: BaseException) -> NoReturn:
        """Raise why a worker did not open the workload and the device."""
        if isinstance(error, SystemExit):  # of the user's code that unpickling runs
            mark_users(error)
        if isinstance(error, InvalidArgument) and self._device is not None:
            raise WorkerFailed(f"{error}, although it was readable before") from error
        raise error

    def call(self, request: Request, deadline: Deadline, on_stage: OnStage) -> Reply:
        """Send a request; a worker that does not answer is ended."""
        assert self.process is not None  # a prober opens before it calls
        message = message_of_request(request, self._strategies)
        return reply_of(self.process.ask(message, deadline, on_stage))

    def drop(self) -> None:
        """End the worker; the next one is started by `open`."""
        self._drops += 1
        process, self.process = self.process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the workers, and let the workload's files go."""
        with interrupts_deferred():
            self.drop()
            for file in self._files:
                file.close()


def path_of(file: IO[bytes]) -> Path:
    """Return the path by which any process here opens a file that this one holds open."""
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


class _Late(Exception):
    """The deadline is over."""


_TAIL_BYTES = 64 * 2**10
_REAP_SECONDS = 10.0
# To fork takes a server milliseconds. One that does not within these seconds, or this share of
# those that are left, is replaced, and what replaces it has the rest to import torch in.
_FORK_SECONDS, _SHARE_OF_FORK = 10.0, 0.25
_LONGEST_SECONDS = 1e6  # that a socket's limit surely takes
_STACK_SECONDS = 2.0
_STACK_LINES = 12
_STACK_MARK = b"(most recent call first):"
_THROWN = b"terminate called after throwing an instance of "  # in C++, and nothing caught it


class WorkerProcess:
    """A worker process, and the supervisor that ends it with all that it started.

    Args:
        deadline: for a server to import torch and start it; None: in as long as that may take.

    Raises:
        WorkerFailed: no process could be started.
        NoReply: the server that imports torch ended, or did not come so far in time.
        SearchTimedOut: it did not before the search ended.

    Attributes:
        pid: its process id.
        has_ended: whether it was ended.
    """

    def __init__(self, deadline: Deadline | None = None) -> None:
        if not sys.executable:
            raise WorkerFailed(
                "sys.executable is empty, as in a program that embeds Python: set it to the Python "
                "that workers start with"
            )
        self.has_ended, self._tail = False, b""
        self._returncode: int | None = None
        self._reaping = threading.RLock()
        deadline = deadline or Deadline.after(START_TIMEOUT_S)
        with beyond_standard_streams():
            self._life, life = Pipe()
            self._wire, wire = Pipe()
            self._output, output = Pipe(duplex=False)
        closed_in_forks(self._life, self._wire)
        try:
            with life, wire, output:
                server = run_forked("autofit.probing.supervisor:supervise", (life, wire, output))
            self.pid = self._told_pid(server, deadline)
            self._threads = [threading.Thread(target=self._drain, daemon=True)]
            self._threads[0].start()
        except BaseException as error:  # with its life the worker ends
            for each in (self._life, self._wire, self._output):
                each.close()
            if isinstance(error, OSError):
                raise WorkerFailed(f"the worker process could not be started: {error}") from error
            raise

    def _told_pid(self, server: ForkServer, deadline: Deadline) -> int:
        """Return its process id once it is started."""
        kills, seconds = oom_kills(), deadline.seconds_left
        if server.has_forked:
            seconds = min(_FORK_SECONDS, seconds * _SHARE_OF_FORK)
        if not self._life.poll(seconds):
            server.end()
            if server.has_forked:
                raise NoReply(Outcome.CRASHED, "the process that forks workers hung")
            if deadline.ends_search:
                raise SearchTimedOut("the time of the search is over")
            words = f"torch was not imported within {format_seconds(deadline.seconds)}"
            raise NoReply(Outcome.TIMEOUT, words)
        try:
            pid: int = self._life.recv()
            server.has_forked = True
            return pid
        except (EOFError, OSError):
            returncode, printed = server.end(grace_s=_REAP_SECONDS)
            words = words_of_death(returncode, _why_it_ended(printed))
            raise NoReply(outcome_of_death(returncode, kills), words) from None

    def ask(self, message: bytes, deadline: Deadline, on_stage: OnStage = ignore_stage) -> bytes:
        """Send a request and wait for the reply; `on_stage` gets the stages that begin meanwhile.

        Raises:
            NoReply: it ended instead, or did not answer in time; it has been killed.
            SearchTimedOut: it did not answer before the search ended; it has been killed.
        """
        kills = oom_kills()
        try:
            self._send(message, deadline)
            while isinstance(reply := self._received(deadline, on_stage), str):
                on_stage(reply)
        except _Late:
            if deadline.ends_search:  # there is no time to ask where it is
                self.kill()
                raise SearchTimedOut("the time of the search is over") from None
            stack = self._stack()
            self.kill()
            words = f"no answer within {format_seconds(deadline.seconds)}; it hung here:\n{stack}"
            raise NoReply(Outcome.TIMEOUT, words) from None
        except BaseException:  # after a Ctrl-C it may answer later, to nobody
            self.kill()
            raise
        if reply is None:
            returncode = self._reap()
            self.kill()  # now everything that it printed has been read
            words = words_of_death(returncode, _why_it_ended(self._tail))
            raise NoReply(outcome_of_death(returncode, kills), words)
        return reply

    def _send(self, message: bytes, deadline: Deadline) -> None:
        """Send a message; `_Late`: it is not read in time. One that has ended need not read it."""
        self._bound(socket.SO_SNDTIMEO, deadline)
        try:
            self._wire.send_bytes(message)
        except BlockingIOError:
            raise _Late from None
        except ConnectionError:
            pass  # what ended it shows when the reply is awaited

    def _received(self, deadline: Deadline, on_stage: OnStage) -> bytes | str | None:
        """Return a reply or a stage; None: it has ended. `_Late`: neither came in time."""
        while not wait([self._wire, self._life], min(QUIET_S, deadline.seconds_left)):
            if not deadline.seconds_left:
                raise _Late
            on_stage(STILL_RUNNING)
        try:
            if self._wire.poll():
                self._bound(socket.SO_RCVTIMEO, deadline)
                received: bytes | str = self._wire.recv()
                return received
        except BlockingIOError:  # it sent the beginning, or user code wrote there
            raise _Late from None
        except (EOFError, OSError):
            pass
        except Exception:  # unpickling what is no message may raise anything
            words = (
                "the worker sent something that is not a reply: does its code write to descriptors?"
            )
            raise NoReply(Outcome.CRASHED, words) from None
        return None

    def _bound(self, option: int, deadline: Deadline) -> None:
        """Have the wire raise BlockingIOError where it waits beyond the deadline."""
        seconds = min(max(deadline.seconds_left, 1e-3), _LONGEST_SECONDS)
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._wire.fileno())) as wire:
            wire.setsockopt(socket.SOL_SOCKET, option, limit)

    def kill(self) -> None:
        """End it and all that it started at once, and wait for it (within bounds)."""
        self.has_ended = True
        with interrupts_deferred():
            with contextlib.suppress(OSError):
                self._life.send(None)
            self._reap()
            for thread in self._threads:
                thread.join(1.0)

    def _reap(self) -> int | None:
        """Return its exit status, or None if it is left in a call of the driver."""
        with self._reaping:
            if self._returncode is None:
                try:
                    if self._life.poll(_REAP_SECONDS):
                        self._returncode = self._life.recv()
                except (EOFError, OSError):  # with the supervisor, which somebody killed
                    self._returncode = -signal.SIGKILL
            return self._returncode

    def _stack(self) -> str:
        """Return where it hangs: it prints its stack at a signal, even when Python is stuck."""
        before = self._tail
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)
        end = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < end:
            time.sleep(0.1)
            _, mark, stack = self._tail.rpartition(_STACK_MARK)
            if mark and self._tail != before:
                return _first_lines(stack)
        return "unknown: the process is stopped, or inside a driver call"

    def _drain(self) -> None:
        """Keep the end of what it prints, however much that is and however long its lines."""
        with contextlib.suppress(OSError):  # Ctrl-C came as it began
            while chunk := os.read(self._output.fileno(), _TAIL_BYTES):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]


def _why_it_ended(printed: bytes) -> str:
    """Return where it crashed, if Python could still print that; else its last lines."""
    before, mark, stack = printed.rpartition(_STACK_MARK)
    if not mark:
        return _last_lines(printed, 5)
    _, thrown, what = before.rpartition(_THROWN)
    if thrown:  # the line after it says what
        return f"{_first_lines(what, 2)}\n{_first_lines(stack)}"
    error = _last_lines(before.rpartition(b"\n")[0], 1)
    return f"{error}\n{_first_lines(stack)}"


def outcome_of_death(returncode: int | None, kills_before: int | None) -> Outcome:
    """Return the outcome that a worker's end stands for.

    Args:
        returncode: negative for a signal.
        kills_before: `oom_kills()` when the request was sent.
    """
    if returncode != -signal.SIGKILL:
        return Outcome.CRASHED
    kills = oom_kills()
    is_known = kills is not None and kills_before is not None
    return Outcome.CRASHED if is_known and kills == kills_before else Outcome.HOST_OOM


def words_of_death(returncode: int | None, printed: str) -> str:
    """Return how a worker ended, and what it printed last."""
    if returncode is None:
        how = "did not end when it was killed: it is inside a driver call"
    elif returncode < 0:
        names = {each.value: each.name for each in signal.Signals}
        how = f"was killed by {names.get(-returncode, f'signal {-returncode}')}"
    else:
        how = f"exited with {returncode}"
    return f"the worker {how}" + (f"; it printed last:\n{printed}" if printed else "")


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed to free host memory, or None if unknown."""
    try:
        counters = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [int(line.split()[1]) for line in counters if line.startswith("oom_kill ")]
    return counts[0] if counts else None


def _first_lines(output: bytes, lines: int = _STACK_LINES) -> str:
    return "\n".join(output.decode(errors="replace").strip("\n").splitlines()[:lines])


def _last_lines(output: bytes, lines: int) -> str:
    text = output.decode(errors="replace").strip()
    return "\n".join(line[:2000] for line in text.splitlines()[-lines:])
