"""A channel to a worker process, as the parent sees it: started, asked, killed when it must be."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from autofit.errors import InvalidArgument, SearchTimedOut, WorkerFailed, mark_users
from autofit.interrupts import interrupts_deferred
from autofit.measurement import Outcome
from autofit.probing.faults import fault_of
from autofit.probing.forked_process import ForkedProcess, ServerDied, pipe, run_forked
from autofit.probing.messages import (
    QUIET_S,
    STACK_SIGNAL,
    STILL_RUNNING,
    Deadline,
    DeviceFacts,
    DeviceFull,
    NoReply,
    OnStage,
    Reply,
    Request,
    ignore_stage,
    message_of_request,
    reply_of,
    reply_to,
)
from autofit.probing.process_lifetime import kill_marked, new_mark
from autofit.probing.serialization import Payload, nameless_file, write_payload
from autofit.strategy import ALONE, Strategy, World
from autofit.training.workload import Workload
from autofit.units import format_seconds

# For a worker to import torch and open the device.
START_TIMEOUT_S = 120.0


class WorkerChannel:
    """A channel to a worker process; implements `autofit.probing.messages.Channel`.

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
        self._device: DeviceFacts | None = None
        self._strategies = strategies
        self._files = [nameless_file()]
        self.payload, loader = path_of(self._files[0]), None
        self._opening: dict[str, Any] = {
            "payload": str(self.payload),
            "device": str(device) if device else None,  # a torch.device cannot be sent as JSON
            "seed": seed,
            "world": asdict(world),
            "threads": threads,
        }
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
            try:
                opened = self._opened(ends_at)
            except NoReply as lost:
                if lost.outcome is Outcome.TIMEOUT:
                    raise WorkerFailed(lost.detail) from None
                try:  # a death may be an accident: once more
                    opened = self._opened(ends_at)
                except NoReply as lost_again:
                    raise WorkerFailed(lost_again.detail) from None
            if (error := opened.exception) is not None:
                self.drop()
                if isinstance(error, SystemExit):  # of the user's code that unpickling runs
                    mark_users(error)
                if isinstance(error, InvalidArgument) and self._device is not None:
                    raise WorkerFailed(f"{error}, although it was readable before") from error
                fault = fault_of(error)
                if fault.outcome is not Outcome.OOM:
                    raise error
                raise DeviceFull(
                    f"the device has no room for a worker: {fault.detail}. Other processes hold "
                    "nearly all of its memory: end them, or choose another device"
                )
            self._device = opened.value
        assert self._device is not None  # as above
        return self._device

    def call(self, request: Request, deadline: Deadline, on_stage: OnStage) -> Reply:
        """Send a request; a worker that does not answer is ended."""
        assert self.process is not None  # a prober opens before it calls
        message = message_of_request(request, self._strategies)
        return reply_of(self.process.ask(message, deadline, on_stage))

    def drop(self) -> None:
        """End the worker; the next one is started by `open`."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the workers, and let the workload's files go."""
        with interrupts_deferred():
            self.drop()
            for file in self._files:
                file.close()

    def _opened(self, ends_at: float) -> Reply:
        """Start a worker and return what it says of the device; a death raises NoReply."""
        files = [file.fileno() for file in self._files]
        deadline = Deadline.after(START_TIMEOUT_S, ends_at)
        is_rank = self._opening["world"]["size"] > 1
        self.process = WorkerProcess(files, is_rank=is_rank, deadline=deadline)
        return reply_of(self.process.ask({"open": self._opening}, deadline))


def path_of(file: IO[bytes]) -> Path:
    """Return the path by which a worker opens a file that it inherits."""
    return Path(f"/dev/fd/{file.fileno()}")


def start_worker(
    given: Mapping[str, Any],
    inherited: Sequence[int],
    environment: Mapping[str, str],
    deadline: Deadline,
) -> ForkedProcess:
    """Start a worker; the one place where such a process is made.

    Args:
        given: to `autofit.probing.worker.main`.
        inherited: descriptors that the worker keeps.
        environment: of the worker.
        deadline: until when it runs.
    """
    kills = oom_kills()
    try:
        return run_forked(
            "autofit.probing.worker:main",
            given,
            environment=environment,
            inherited=inherited,
            seconds=deadline.seconds_left,
        )
    except TimeoutError:
        if deadline.ends_search:
            raise SearchTimedOut("the time of the search is over") from None
        words = f"torch was not imported within {format_seconds(deadline.seconds)}"
        raise NoReply(Outcome.TIMEOUT, words) from None
    except OSError as error:
        raise WorkerFailed(f"the worker process could not be started: {error}") from error
    except ServerDied as died:
        words = words_of_death(died.returncode, _last_words(died.printed))
        raise NoReply(outcome_of_death(died.returncode, kills), words) from None


_TAIL_BYTES = 64 * 2**10
_REAP_SECONDS = 10.0
_STACK_SECONDS = 2.0
_STACK_LINES = 12
_STACK_MARK = b"(most recent call first):"
_THROWN = b"terminate called after throwing an instance of "  # in C++, and nothing caught it


class WorkerProcess:
    """A worker process with pipes for requests, replies and its life.

    Args:
        files: descriptors of files that the worker may open as `/dev/fd/N`.
        is_rank: whether it will be one of several ranks.
        deadline: until when it has to run; None: in `START_TIMEOUT_S`.

    Attributes:
        has_ended: whether it was ended.

    Raises:
        WorkerFailed: it could not be started.
        NoReply: a process that imports torch for it ended, or took too long.
        SearchTimedOut: it took longer than the search may.
    """

    def __init__(
        self,
        files: Sequence[int] = (),
        *,
        is_rank: bool = False,
        deadline: Deadline | None = None,
    ) -> None:
        if not sys.executable:
            raise WorkerFailed(
                "sys.executable is empty, as in a program that embeds Python: set it to the Python "
                "that workers start with"
            )
        self.has_ended = False
        requests_read, requests_write = pipe()
        replies_read, replies_write = pipe()
        lifeline_read, self._lifeline = pipe()
        inherited = (requests_read, replies_write, lifeline_read)
        given = {
            "lifeline_fd": lifeline_read,
            "requests_fd": requests_read,
            "replies_fd": replies_write,
            "is_rank": is_rank,
        }
        self._mark = new_mark()
        try:
            self._process = start_worker(
                given,
                (*inherited, *files),
                {**os.environ, **self._mark},
                deadline or Deadline.after(START_TIMEOUT_S),
            )
        except BaseException:
            for descriptor in (requests_write, replies_read, self._lifeline):
                os.close(descriptor)
            raise
        finally:
            for descriptor in inherited:
                os.close(descriptor)
        self._requests = os.fdopen(requests_write, "w")
        self._answers = os.fdopen(replies_read, errors="replace")
        self._asked = ""
        self._ending = threading.Lock()
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._tail = b""
        self._listener = _thread(self._listen)
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threads = (self._drain, self._watch, self._write)
        self._threads = [self._listener, *map(_thread, threads)]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(
        self, message: Mapping[str, Any], deadline: Deadline, on_stage: OnStage = ignore_stage
    ) -> dict[str, Any]:
        """Send a request and wait for the reply; `on_stage` gets the stages that it names.

        Raises:
            NoReply: it ended instead, or did not answer in time; it has been killed.
            SearchTimedOut: it did not answer before the search ended; it has been killed.
        """
        kills = oom_kills()
        self._asked = secrets.token_hex(8)  # which nothing that writes to every pipe can guess
        self._outbox.put(json.dumps({**message, "number": self._asked}))
        try:
            while (reply := self._reply(deadline, on_stage)) is not None and "stage" in reply:
                on_stage(reply["stage"])
        except queue.Empty:
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
            words = words_of_death(returncode, _last_words(self._tail))
            raise NoReply(outcome_of_death(returncode, kills), words)
        return reply

    def _reply(self, deadline: Deadline, on_stage: OnStage) -> dict[str, Any] | None:
        """Return the reply to the last request, past anything else on the pipe; None: it ended."""
        while (line := self._line(deadline, on_stage)) is not None:
            if (reply := reply_to(self._asked, line)) is not None:
                return reply
        return None

    def _line(self, deadline: Deadline, on_stage: OnStage) -> str | None:
        """Return the next line on the pipe, however long that takes; queue.Empty: too long."""
        while True:
            seconds = min(QUIET_S, deadline.seconds_left)
            try:
                return self._replies.get(timeout=seconds)
            except queue.Empty:
                if not deadline.seconds_left:
                    raise
                on_stage(STILL_RUNNING)

    def kill(self) -> None:
        """End it and all that it started at once, and wait for it (within bounds)."""
        self.has_ended = True
        with interrupts_deferred(), self._ending:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            kill_marked(self._mark)
            self._reap()
            self._outbox.put(None)
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            for thread in self._threads:
                thread.join(1.0)

    def _reap(self) -> int | None:
        return self._process.wait(_REAP_SECONDS)  # None: leave it in a call of the driver

    def _stack(self) -> str:
        """Return where it hangs: it prints its stack at a signal, even when Python is stuck."""
        before = self._tail
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, STACK_SIGNAL)
        end = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < end:
            time.sleep(0.1)
            _, mark, stack = self._tail.rpartition(_STACK_MARK)
            if mark and self._tail != before:
                return _first_lines(stack)
        return "unknown: the process is stopped, or inside a driver call"

    def _listen(self) -> None:
        with self._answers:
            for line in self._answers:
                self._replies.put(line)
        self._replies.put(None)

    def _write(self) -> None:
        """Send what is to be sent; a worker that does not read lets nobody else wait."""
        with contextlib.suppress(OSError), self._requests:  # its end shows to who waits for it
            while (line := self._outbox.get()) is not None:
                self._requests.write(line + "\n")
                self._requests.flush()

    def _drain(self) -> None:
        """Keep the end of what it prints, however much that is and however long its lines."""
        with self._process.stdout as output:
            while chunk := os.read(output.fileno(), _TAIL_BYTES):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def _watch(self) -> None:
        """Its end is known even where a child of its own still holds the pipes open."""
        self._process.wait()
        self._listener.join(1.0)
        self._replies.put(None)


def _last_words(printed: bytes) -> str:
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
    """Return how many processes the kernel has killed to free host memory; None: unknown."""
    try:
        counters = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [int(line.split()[1]) for line in counters if line.startswith("oom_kill ")]
    return counts[0] if counts else None


def _thread(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _first_lines(output: bytes, lines: int = _STACK_LINES) -> str:
    return "\n".join(output.decode(errors="replace").strip("\n").splitlines()[:lines])


def _last_lines(output: bytes, lines: int) -> str:
    text = output.decode(errors="replace").strip()
    return "\n".join(line[:2000] for line in text.splitlines()[-lines:])
