"""A channel to workers in the processes of an executor: any `concurrent.futures.Executor`.

The executor has to pickle functions of installed modules and bytes, and to run them in processes
that may start processes, on machines whose device nobody else uses. Each of its processes keeps a
warm worker from one request to the next, and ends it `IDLE_S` after the last one. The workload
travels once to each: a process that does not have it says so.

Promises: a request whose process or machine went away is given to another one, once; one that is
not answered for longer than it can take is submitted again, and the first answer counts.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from autofit.devices.base import DeviceLock
from autofit.errors import SearchTimedOut, WorkerFailed
from autofit.measurement import Outcome
from autofit.probing.requests import Deadline, DeviceFacts, NoReply, OnStage, Reply, Request
from autofit.probing.serialization import Payload, nameless_file, read_payload, write_payload
from autofit.probing.wire import message_of_reply, message_of_request, reply_of
from autofit.probing.worker_channel import START_TIMEOUT_S, WorkerChannel, path_of
from autofit.strategy import Strategy
from autofit.training.workload import Workload
from autofit.units import format_seconds, kind_of

# A worker in an executor's process ends so long after its last request: a search that was killed
# leaves nothing behind for longer, and choosing a plan takes less.
IDLE_S = 60.0

# Of one request, while none is answered: each is asked as late as an answer may take.
MAX_COPIES = 8

# After the end of the search, for a process to say by itself that its time was over.
_SLACK_S = 5.0


@dataclass(frozen=True)
class _Opening:
    """What a process of the executor needs for its worker.

    Attributes:
        payload: the workload and the strategies, as `write_payload` writes them.
        device: the name of the device on every machine; None: cuda where there is one.
        seed: of everything random.
        sys_path: where modules are looked for here.
    """

    payload: bytes
    device: str | None
    seed: int
    sys_path: list[str]


@dataclass(frozen=True)
class _Job:
    """A request to a process of the executor.

    Attributes:
        message: to its worker; None: to open the device.
        seconds: after which the worker counts as hung.
        ends_in_s: after which the search ends; infinite where nothing ends it.
        needs_fresh_worker: whether a worker that is there is ended first.
    """

    message: bytes | None
    seconds: float
    ends_in_s: float
    needs_fresh_worker: bool


# The message of a reply, or why there is none.
_Answer = bytes | NoReply | SearchTimedOut


class ExecutorChannel:
    """A channel to one worker at a time in any process of an executor.

    Args:
        executor: runs `serve`; it is not shut down.
        workload, strategies, device, seed: as for `WorkerChannel`.
    """

    def __init__(
        self,
        executor: Executor,
        workload: Workload,
        strategies: Sequence[Strategy] = (),
        *,
        device: str | None = None,
        seed: int = 0,
    ) -> None:
        self._executor, self._strategies = executor, strategies
        with nameless_file() as file:
            write_payload(Payload(workload, strategies), path_of(file))
            payload = file.read()
        self._opening = _Opening(
            payload,
            str(device) if device else None,  # a torch.device would need torch to be read
            seed,
            list(sys.path),
        )
        self._key = uuid.uuid4().hex
        self._is_dropped = False
        self._device: DeviceFacts | None = None
        self._pending: list[Future[Any]] = []  # copies of the request that is being answered

    @property
    def pid(self) -> int | None:
        """0 once a worker is open: its process is on another machine."""
        return None if self._device is None else 0

    def open(self, ends_at: float = math.inf) -> DeviceFacts:
        """Have a process of the executor start a worker, and return what it says of the device."""
        if self._device is None:
            try:
                opened = self._ask(None, Deadline.after(START_TIMEOUT_S, ends_at)).value_or_raise()
            except NoReply as lost:
                raise WorkerFailed(lost.detail) from None
            if not isinstance(opened, DeviceFacts):
                raise _no_answer(opened)
            self._device = opened
        return self._device

    def call(self, request: Request, deadline: Deadline, on_stage: OnStage) -> Reply:
        """Send a request and return the reply; stages stay where they are."""
        return self._ask(message_of_request(request, self._strategies), deadline)

    def drop(self) -> None:
        """Have the next request answered by a fresh worker, and wait for none any more."""
        self._is_dropped = True
        for future in list(self._pending):
            future.cancel()

    def close(self) -> None:
        """Ask for an end of a worker that waits; others end by themselves."""
        with suppress(Exception):  # the executor was shut down, or is broken
            self._executor.submit(end, self._key)

    def _ask(self, message: bytes | None, deadline: Deadline) -> Reply:
        """Return the reply of a process."""
        job = _Job(
            message,
            deadline.seconds,
            deadline.ends_at - time.monotonic(),
            self._is_dropped,
        )
        self._is_dropped = False
        answer = self._answer(job, deadline)
        if isinstance(answer, NoReply | SearchTimedOut):
            raise answer
        try:
            return reply_of(answer)
        except Exception as error:  # unpickling what is no reply may raise anything
            raise _no_answer(answer) from error

    def _answer(self, job: _Job, deadline: Deadline) -> Any:
        """Return what a process answers; one that went away is replaced once."""
        opening: _Opening | None = None
        is_second = False
        while True:
            ended = self._first_to_end(opening, job, deadline)
            lost = _why_lost(ended)
            if lost is None and ended.result() is None and opening is None:
                opening = self._opening  # the process lacks the workload
            elif lost is None:
                return ended.result()
            elif is_second or self._is_dropped:  # by another thread: nobody wants the answer
                how = "was lost twice" if is_second else "was ended"
                raise NoReply(Outcome.CRASHED, f"the process that ran it {how}: {lost}")
            else:
                is_second = True

    def _first_to_end(self, opening: _Opening | None, job: _Job, deadline: Deadline) -> Future[Any]:
        """Return the first job that ends; it may wait in a queue as long as the search lasts.

        An executor may lose an answer and say nothing. That looks like a long queue, so the first
        request stays in it beside the next.

        Raises:
            WorkerFailed: not one of `MAX_COPIES` was answered.
        """
        ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        longest_s = START_TIMEOUT_S + deadline.seconds + _SLACK_S
        try:
            for _ in range(MAX_COPIES):
                self._submit(opening, job).add_done_callback(ended.put)
                left_s = max(0.0, deadline.ends_at + _SLACK_S - time.monotonic())
                with suppress(queue.Empty):
                    return ended.get(timeout=min(longest_s, left_s))
                if left_s <= longest_s:
                    raise SearchTimedOut("the time of the search is over")
            raise WorkerFailed(
                f"the executor has answered none of {MAX_COPIES} requests, one every "
                f"{format_seconds(longest_s)}: are its machines running?"
            )
        finally:
            for future in self._pending:
                future.cancel()
            self._pending.clear()

    def _submit(self, opening: _Opening | None, job: _Job) -> Future[Any]:
        try:
            future = self._executor.submit(serve, self._key, opening, job)
        except Exception as error:  # each executor has errors of its own
            raise WorkerFailed(f"the executor accepts no more probes: {error}") from error
        self._pending.append(future)
        if self._is_dropped:  # by another thread, since the request was made
            future.cancel()
        return future


def _why_lost(ended: Future[Any]) -> str | None:
    """Return why a job has no result, such as a KeyboardInterrupt of its own.

    None if it has one.
    """
    if ended.cancelled():
        return "it was cancelled"
    error = ended.exception()
    return None if error is None else f"{type(error).__name__}: {error}"


def _no_answer(given: object) -> WorkerFailed:
    return WorkerFailed(
        f"the executor returned {kind_of(given)} ({str(given)[:80]}) instead of the result of the "
        "submitted function: see docs/distributed.md for what it must do"
    )


# In the processes of the executor.


class _Held:
    """The worker of one search in this process, and the device that it has to itself."""

    def __init__(self, opening: _Opening) -> None:
        sys.path += [path for path in opening.sys_path if path not in sys.path]
        self._lock: DeviceLock | None = None
        with nameless_file() as file:
            file.write(opening.payload)
            file.flush()
            payload = read_payload(path_of(file))
        self._channel = WorkerChannel(
            payload.workload,
            payload.strategies,
            device=opening.device,
            seed=opening.seed,
            threads=torch.get_num_threads(),  # of this machine, not of the one that searches
        )

    def answer(self, job: _Job) -> _Answer:
        """Return the worker's answer, or why there is none."""
        ends_at = time.monotonic() + job.ends_in_s
        if job.needs_fresh_worker:
            self._channel.drop()
        try:
            device = self._channel.open(ends_at)
            if self._lock is None and device.exclusive_key is not None:
                self._lock = DeviceLock(device.exclusive_key)
            if job.message is None:
                return message_of_reply(Reply(replace(device, exclusive_key=None)))
            assert self._channel.process is not None  # it is open
            return self._channel.process.ask(job.message, Deadline.after(job.seconds, ends_at))
        except (NoReply, SearchTimedOut) as none:
            return none
        except Exception as error:
            return message_of_reply(Reply(exception=error))

    def close(self) -> None:
        """End the worker, and give the device back."""
        self._channel.close()
        if self._lock is not None:
            self._lock.release()


_lock = threading.RLock()  # one request is served at a time
_held: dict[str, _Held] = {}
_idle: list[threading.Timer] = []


def serve(key: str, opening: _Opening | None, job: _Job) -> _Answer | None:
    """Answer a request of the search of that key, or None if its workload has not come here yet."""
    with _lock:
        while _idle:
            _idle.pop().cancel()
        if key not in _held:
            if opening is None:
                return None
            for other in list(_held):
                end(other)
            try:
                _held[key] = _Held(opening)
            except Exception as error:
                return message_of_reply(Reply(exception=error))
        answer = _held[key].answer(job)
        timer = threading.Timer(IDLE_S, end, (key,))
        timer.daemon = True
        timer.start()
        _idle.append(timer)
        return answer


def end(key: str) -> None:
    """End the worker of that search in this process, if there is one."""
    with _lock:
        held = _held.pop(key, None)
        if held is not None:
            held.close()
