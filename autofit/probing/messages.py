"""Requests to a worker, which holds the workload and the device, and the replies.

They travel as one JSON object a line, in which exceptions and results travel by value.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

import cloudpickle

from autofit.errors import (
    AutofitError,
    DeviceUnavailable,
    WorkerTraceback,
    WorkloadFailed,
    is_users,
    mark_users,
    traceback_text,
)
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.faults import text_of
from autofit.probing.serialization import dumps, unreachable_by_value
from autofit.strategy import Strategy

if TYPE_CHECKING:
    from autofit.probing.session import Session


@dataclass(frozen=True)
class ProbeRequest:
    """A request to run one plan.

    Attributes:
        resolved: the plan to run.
        vram_budget_bytes: the most that peak reserved plus non-torch bytes may come to. None: the
            budget that the prober was opened with.
        incumbent_samples_per_second: the rate to beat: steps are timed until the plan is seen to
            be slower, or its step time is known to 3 %. None: nothing to beat, and to 1 %.
        full_accumulation: run every micro-batch of the optimizer step, as a confirmation does;
            otherwise two stand for all of them, and the times are scaled.
        expected_seconds: expected duration of the probe; a multiple of it counts as a hang. None:
            unknown.
        seconds_left: after so many the search ends the probe, which says nothing about the plan.
            None: unlimited.
        most_timed_seconds: no further step is timed once they add up to so many.
        steps: time at least this many optimizer steps, however slow they are.
    """

    resolved: ResolvedPlan
    vram_budget_bytes: int | None = None
    incumbent_samples_per_second: float | None = None
    full_accumulation: bool = False
    expected_seconds: float | None = None
    seconds_left: float | None = None
    most_timed_seconds: float = 2.0
    steps: int | None = None

    @property
    def plan(self) -> Plan:
        """The plan to run, without payloads and strategies."""
        return self.resolved.plan


@dataclass(frozen=True)
class Call:
    """A request to call a function where the workload and the device are.

    Attributes:
        function: called with the session. Sent to a worker by the name it is imported by, so a
            function of a module (with `functools.partial` for its other arguments): this room
            need not import what it runs, and a worker imports that only when it is asked for it.
        vram_budget_bytes: the budget that the function runs within.
    """

    function: Callable[[Session], Any]
    vram_budget_bytes: int


Request = ProbeRequest | Call

# Called with the name of a stage that begins, such as "looking the workload over".
OnStage: TypeAlias = Callable[[str], None]


# The stage that is told of where nothing else was for `QUIET_S`.
STILL_RUNNING = "still running"
# After so long without a word who waits is told that what runs still does.
QUIET_S = 30.0


def ignore_stage(stage: str) -> None:
    """Let the name of a stage go."""


@dataclass(frozen=True)
class Reply:
    """The answer to a request, and what it means for whoever gave it.

    Attributes:
        value: the `Measurement` of a probe; the return value of a call.
        exception: what the user's code raised, for outcome user_error; or what came out of a call,
            marked where it is the user's (`autofit.errors.is_users`).
        traceback: its traceback as text, where the exception itself has lost it.
        spent: the process should not answer another request.
        device_fault: how the device fails at a small computation now; None: it works.
        worth_repeating: the plan's size may not be to blame for its outcome: it ran out of memory
            where live tensors and the request would have fitted, or went over the budget by the
            libraries that it loaded.
        is_consequence: it failed since another rank did; see `fault_table.Row`.
    """

    value: Any = None
    exception: BaseException | None = None
    traceback: str | None = None
    spent: bool = False
    device_fault: str | None = None
    worth_repeating: bool = False
    is_consequence: bool = False

    def value_or_raise(self) -> Any:
        """Return the value of a call; raise what came out of it instead."""
        if (error := self.exception_to_raise()) is not None:
            raise error
        return self.value

    def exception_to_raise(self) -> BaseException | None:
        """Return the exception as the user is to see it, with the traceback text as its cause."""
        error = self.exception
        if error is not None and self.traceback and not isinstance(error, AutofitError):
            error.__cause__ = WorkerTraceback(self.traceback)
        return error


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        measurement: how the plan ended and what was measured.
        user_exception: what the user's code raised, as it was raised; None exactly where the
            outcome is another than user_error. `WorkloadFailed` where nothing better is known.
    """

    measurement: Measurement
    user_exception: BaseException | None = None

    def __post_init__(self) -> None:
        error = None
        if self.measurement.outcome is Outcome.USER_ERROR:
            words = self.measurement.detail or "the workload failed"
            error = self.user_exception or WorkloadFailed(words)
        object.__setattr__(self, "user_exception", error)


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of the opened device.

    Attributes:
        total_bytes: its memory.
        free_bytes: the memory that this search could hold of it.
        exclusive_key: name of a device that only one search may use at a time; None: any number.
    """

    total_bytes: int
    free_bytes: int
    exclusive_key: str | None


class DeviceFull(DeviceUnavailable):
    """Other processes hold nearly all of the device's memory."""


class NoReply(Exception):
    """Whoever was asked ended or hung instead of answering, and has been ended.

    Attributes:
        outcome: timeout, crashed or host_oom.
        detail: how it ended, and where it was as far as that is known.
    """

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(outcome, detail)
        self.outcome = outcome
        self.detail = detail


@dataclass
class Deadline:
    """Until when a reply is awaited; stages of what is asked may each have their own time.

    Attributes:
        at: in the seconds of `time.monotonic`.
        ends_at: when the whole search ends; who has not answered before that counts as hung.
        seconds: that were given, at first or by `restart`.
    """

    at: float
    ends_at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float, ends_at: float = math.inf) -> Deadline:
        """Return the deadline in so many seconds, or the end of the search where that is first."""
        deadline = cls(ends_at, ends_at, seconds)
        deadline.restart(seconds)
        return deadline

    def restart(self, seconds: float) -> None:
        """Await the reply for so many seconds from now, and not beyond the end of the search."""
        self.at, self.seconds = min(time.monotonic() + seconds, self.ends_at), seconds

    @property
    def ends_search(self) -> bool:
        """Whether the time of the whole search is over then; else it counts as a hang."""
        return self.at == self.ends_at

    @property
    def seconds_left(self) -> float:
        """Seconds until then; 0 afterwards."""
        return max(self.at - time.monotonic(), 0.0)


class Channel(Protocol):
    """A way to whoever holds the workload and the device: a worker, or several that act as one."""

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None where there is none now."""

    def open(self, ends_at: float = math.inf) -> DeviceFacts:
        """Have a worker running, and the device open in it.

        Args:
            ends_at: when the search ends, in the seconds of `time.monotonic`.

        Raises:
            DeviceUnavailable: the device is not there; `DeviceFull` where it has no room.
            WorkerFailed: no worker can be started.
            SearchTimedOut: the search ended first.
        """

    def call(self, request: Request, deadline: Deadline, on_stage: OnStage) -> Reply:
        """Send a request and return the reply; called after `open`.

        Raises:
            NoReply: there was none by the deadline; the worker has been ended.
            SearchTimedOut: likewise, and the deadline is the search's.
        """

    def drop(self) -> None:
        """End the worker; `open` starts another."""

    def close(self) -> None:
        """Give everything back; the channel is not used after that."""


# A message is one line of JSON: its number, and what it says, pickled.

# At this signal the worker prints its main thread's stack.
STACK_SIGNAL = signal.SIGUSR1
_MOST_PICKLED_BYTES = 2**20


def send(stream: IO[str], message: Mapping[str, Any]) -> None:
    """Write one message."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def reply_to(number: str, line: str) -> dict[str, Any] | None:
    """Return the message in a line if it answers that request, else None."""
    try:
        message = json.loads(line)
    except ValueError:  # code that writes to every descriptor it finds
        return None
    is_it = isinstance(message, dict) and message.get("number") == number
    return message if is_it else None


def message_of_request(request: Request, strategies: Sequence[Strategy]) -> dict[str, Any]:
    """Return the message of a request; these strategies are named in it, not contained."""
    by_value = unreachable_by_value() if isinstance(request, Call) else nullcontext()
    with by_value:
        return {"request": _text(dumps(request, {id(each): each.name for each in strategies}))}


def request_of(message: Mapping[str, Any], strategies: Sequence[Strategy]) -> Request:
    """Return the request in a message, with those of the strategies here."""
    written = io.BytesIO(base64.b64decode(message["request"]))
    request: Request = _RequestReader(written, strategies).load()
    return request


class _RequestReader(pickle.Unpickler):
    """Reads a request in which strategies stand by their names.

    A subclass, because Python 3.13 takes no assignment to `persistent_load`.
    """

    def __init__(self, written: IO[bytes], strategies: Sequence[Strategy]) -> None:
        super().__init__(written)
        self._by_name = {strategy.name: strategy for strategy in strategies}

    def persistent_load(self, pid: str) -> Strategy:
        return self._by_name[pid]


def message_of_reply(reply: Reply) -> dict[str, Any]:
    """Return the message of a reply."""
    error = reply.exception
    raised = None if error is None else _Raised.of(error, reply.traceback)
    return {"reply": _text(dumps((replace(reply, exception=None), raised)))}


def reply_of(message: Mapping[str, Any]) -> Reply:
    """Return the reply in a message."""
    reply: Reply
    reply, raised = pickle.loads(base64.b64decode(message["reply"]))
    if raised is None:
        return reply
    return replace(reply, exception=raised.exception(), traceback=raised.traceback)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


# Exceptions by value.


@dataclass(frozen=True)
class _Raised:
    """An exception by value where that is possible, and always as text."""

    words: str
    traceback: str
    pickled: bytes | None
    is_users: bool

    @classmethod
    def of(cls, exception: BaseException, traceback: str | None) -> _Raised:
        """Return an exception with its traceback as text; None: that which it still has."""
        if traceback is None and exception.__traceback__ is not None:
            traceback = traceback_text(exception)
        kind = f"{type(exception).__module__}.{type(exception).__qualname__}"
        return cls(
            f"{kind}: {text_of(exception)}",
            traceback or "",
            _pickled(exception),
            is_users(exception),
        )

    def exception(self) -> BaseException:
        """Return it with its own type; `WorkloadFailed` where it did not travel by value."""
        error: BaseException = WorkloadFailed(self.words)
        if self.pickled is not None:
            with suppress(Exception):  # its class is the user's: unpickling it may do anything
                error = _loads(self.pickled)
        if self.is_users:
            mark_users(error)
        return error


def _pickled(exception: BaseException) -> bytes | None:
    """Return as much of an exception as can be read back; None where not even its class can.

    The `__init__` of many classes takes more than `args` holds; those are made without calling it.
    The attributes of an exception may hold a whole batch, or may not pickle.
    """
    for state in (None, vars(exception), {}):
        try:
            whole = exception if state is None else _Bare(type(exception), exception.args, state)
            data = dumps(whole)
            if len(data) <= _MOST_PICKLED_BYTES and type(_loads(data)) is type(exception):
                return data
        except Exception:  # an exception may hold anything
            continue
    return None


@dataclass(frozen=True)
class _Bare:
    """An exception in parts."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    def rebuild(self) -> BaseException:
        exception = self.kind.__new__(self.kind, *self.args)
        exception.args = self.args
        vars(exception).update(self.state)
        return exception


class _Unpickler(pickle.Unpickler):
    """Leaves classes alone that exist here already: cloudpickle would set all their members."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _fill_class if found is cloudpickle.cloudpickle._class_setstate else found


def _fill_class(kind: type, state: Any) -> Any:
    is_filled = all(name in vars(kind) for name in state[0])
    return kind if is_filled else cloudpickle.cloudpickle._class_setstate(kind, state)


def _loads(data: bytes) -> BaseException:
    loaded = _Unpickler(io.BytesIO(data)).load()
    exception = loaded.rebuild() if isinstance(loaded, _Bare) else loaded
    if not isinstance(exception, BaseException):
        raise TypeError(f"a {type(exception).__name__} was sent for an exception")
    return exception
