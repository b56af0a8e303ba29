"""Requests to whoever holds the workload and the device, the replies, and the way between them."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from autofit.errors import DeviceUnavailable, WorkloadFailed
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.fork_server import QUIET, import_path
from autofit.strategy import ALONE, Strategy, World

if TYPE_CHECKING:
    from autofit.training.builder import TrainingBuilder


@dataclass(frozen=True)
class Opening:
    """What a worker opens, and where it is called from: the first request to it.

    Attributes:
        payload: path of the workload's file.
        device: "cuda", "cuda:1", "cpu" or None: cuda where there is one.
        seed: for everything random.
        world: the ranks that train together, of which the worker is one.
        threads: that torch computes with; None: as many as in the owner.
        owner_pid: the owner's process id, by which its folder is found: it may have been removed.
        environment: the owner's variables.
        import_path: where modules are found.
        program: the owner's `sys.argv`, without the arguments.
    """

    payload: Path
    device: str | None = None
    seed: int = 0
    world: World = ALONE
    threads: int | None = None
    owner_pid: int = field(default_factory=os.getpid)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    import_path: list[str] = field(default_factory=import_path)
    program: list[str] = field(default_factory=lambda: sys.argv[:1])

    def enter(self) -> None:
        """Have this process see what the owner sees."""
        with suppress(OSError):  # the owner may not enter its own folder
            os.chdir(f"/proc/{self.owner_pid}/cwd")
        os.environ.clear()
        os.environ.update({**QUIET, **self.environment})
        sys.path[:], sys.argv[:] = self.import_path, self.program


@dataclass(frozen=True)
class ProbeRequest:
    """A request to run one plan.

    Attributes:
        resolved: the plan to run.
        vram_budget_bytes: the most that peak reserved plus non-torch bytes may come to. None: the
            budget that the prober was opened with.
        incumbent_samples_per_second: the rate to beat: steps are timed until the plan is seen to
            be slower, or its step time is known to 3%. None: nothing to beat, and to 1%.
        full_accumulation: run every micro-batch of the optimizer step, as a confirmation does;
            otherwise two stand for all of them, and the times are scaled.
        expected_seconds: expected duration of the probe; a multiple of it counts as a hang. None:
            unknown.
        seconds_left: after this many the search ends the probe, which says nothing about the plan.
            None: unlimited.
        most_timed_seconds: no further step is timed once they add up to this many.
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


class Workplace(Protocol):
    """What a function may touch that is called where the workload and the device are.

    Attributes:
        builder: makes trainings of the workload on the device.
        strategies: those that may have settings in a plan.
        notes: what a reader of the report should know of the device.
        on_stage: called with the name of each stage that begins.
        looked_at: what a survey keeps for the next one.
    """

    builder: TrainingBuilder
    strategies: Sequence[Strategy]
    notes: Sequence[str]
    on_stage: OnStage
    looked_at: Any

    def device_fault(self) -> str | None:
        """Return how the device fails at a small computation now.

        None if it works, or is full.
        """


@dataclass(frozen=True)
class Call:
    """A request to call a function where the workload and the device are.

    Attributes:
        function: called with the `Workplace`. Sent to a worker by the name it is imported by, so a
            function of a module (with `functools.partial` for its other arguments): this room
            need not import what it runs, and a worker imports that only when it is asked for it.
        vram_budget_bytes: the budget that the function runs within.
    """

    function: Callable[[Workplace], Any]
    vram_budget_bytes: int


Request = ProbeRequest | Call

# Called with the name of a stage that begins, such as "looking the workload over".
OnStage: TypeAlias = Callable[[str], None]


# At this signal a worker prints its main thread's stack.
STACK_SIGNAL = signal.SIGUSR1
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
        if self.exception is not None:
            raise self.exception
        return self.value

    @property
    def measurement(self) -> Measurement:
        """How the plan of a probe ended and what was measured; raises what prevented the probe."""
        measurement: Measurement = self.value or self.value_or_raise()
        return measurement

    @property
    def user_exception(self) -> BaseException | None:
        """What the user's code raised in a probe; None exactly where it ended otherwise.

        `WorkloadFailed` where nothing better is known.
        """
        if self.measurement.outcome is not Outcome.USER_ERROR:
            return None
        words = self.measurement.detail or "the workload failed"
        return self.exception or WorkloadFailed(words)


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
        outcome: timeout, crashed, host_oom; or poisoned, where its device died.
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
        """Return the deadline in N seconds, or the end of the search where that is first."""
        deadline = cls(ends_at, ends_at, seconds)
        deadline.restart(seconds)
        return deadline

    def restart(self, seconds: float) -> None:
        """Await the reply for this many seconds from now, and not beyond the end of the search."""
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
