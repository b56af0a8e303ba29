"""`Prober`: runs plans of one workload on one device, and survives whatever they do.

It reaches the device through a channel to a worker. The engine of a search needs no more than
`SupportsProbing`, which `autofit.testing.SimulatedProber` implements too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from autofit.devices.base import DeviceLock
from autofit.devices.request import budget_bytes, check_budget, device_meant
from autofit.errors import (
    InvalidArgument,
    WorkerFailed,
    blamed,
    in_one_line,
    note_tried,
)
from autofit.measurement import Measurement, Outcome
from autofit.plan import ResolvedPlan, Scalar
from autofit.probing.fork_server import start_server
from autofit.probing.requests import (
    STILL_RUNNING,
    Call,
    Channel,
    Deadline,
    DeviceFacts,
    DeviceFull,
    NoReply,
    OnStage,
    ProbeRequest,
    Reply,
    Workplace,
    ignore_stage,
)
from autofit.probing.survey import (
    FIRST_SAMPLES,
    NO_TIME,
    SPLIT_GRADIENTS,
    Recomputation,
    StrategyLost,
    Survey,
    note_own_copy,
    stage_of,
)
from autofit.probing.worker_channel import WorkerChannel
from autofit.strategy import Comparison, Phase, Strategy
from autofit.training.workload import Workload
from autofit.units import format_seconds

if TYPE_CHECKING:
    from concurrent.futures import Executor


# Times that a contended probe is run again; one whose size may not be to blame, once.
MAX_REPEATS = 2
# A look at the workload is expected to take as long as this many first forwards of a few samples.
#
# The longest of the built-in strategies took 24 of them, for a GPT-2 of 12 layers on a CPU.
FORWARDS_OF_A_LOOK = 50
# Of the time that all looks have, where there is a timeout: after one that hangs there is as much
# for those that follow, and for those before, which are taken again in a new worker.
SHARE_OF_A_LOOK = 0.5
MIN_LOOK_S = 1.0  # of one that has begun
_LARGEST_SEED = 2**32 - 1
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Target:
    """Where and under which conditions plans run.

    Attributes:
        device: "cuda", "cuda:1" or "cpu"; None: cuda where there is one.
        vram_budget: "24GiB", bytes, or a fraction of the device; None: the free memory, less a
            margin.
        seed: of everything random.
        threads: that torch computes with in a worker; None: as many as here.
        ranks: workers that train one model together, each on a device of its own.
    """

    device: str | None = None
    vram_budget: str | float | None = None
    seed: int = 0
    threads: int | None = None
    ranks: int = 1


class SupportsProbing(Protocol):
    """The part of a prober that the engine of a search needs.

    Raises (any of its methods):
        WorkerFailed: no worker can be started, or it ended or hung amid what is not a probe.
        DeviceUnavailable: the device is gone.
    """

    @property
    def strategies(self) -> Sequence[Strategy]:
        """The strategies that can apply settings of a plan here."""

    @property
    def start_s(self) -> float:
        """Seconds that a fresh worker takes to start."""

    def probe(self, request: ProbeRequest) -> Reply:
        """Run the plan; every way in which it can end is an outcome, not an exception.

        Raises:
            SearchTimedOut: the request's `seconds_left` ended first, which is not the plan's fault.
        """

    def renew(self) -> None:
        """Have the next probe run in a fresh worker; end one that runs in another thread."""


@dataclass(frozen=True)
class Deadlines:
    """Bounds on the time that a prober waits for a reply, in seconds.

    Attributes:
        unknown_s: for requests of unknown length: the survey, a first probe.
        shortest_s: the least for any probe.
        patience: a probe may take this many times its expected duration.
    """

    unknown_s: float = 900.0
    shortest_s: float = 60.0
    patience: float = 20.0

    def of(self, expected_seconds: float | None) -> float:
        """Return the seconds after which a request expected to take this long counts as hung."""
        if expected_seconds is None:
            return self.unknown_s
        return max(self.shortest_s, self.patience * expected_seconds)


class Prober(AbstractContextManager["Prober"]):
    """Runs plans of a workload through a channel; as a context, closes it at the end.

    Args:
        channel: reaches the workload and the device; closed with the prober.
        workload: the workload behind the channel.
        strategies: those that may have settings in a plan.
        vram_budget: see `autofit.devices.request.budget_bytes`.
        deadlines: when a request counts as hung.
        ends_at: when everything ends, in the seconds of `time.monotonic`: whatever is asked later,
            or has not been answered by then, raises SearchTimedOut.
        on_stage: called with the name of each stage that begins and is not a probe.

    Attributes:
        vram_budget_bytes: the budget in bytes. It stays the same when workers are replaced, however
            much memory is free by then.
        start_s: seconds that the last worker took to start and open the device.

    Raises:
        InvalidArgument: the budget cannot be read, or the workload cannot be sent to a worker.
        DeviceUnavailable: the device is not there, is full, or another search is using it.
        WorkerFailed: a worker could not be started.
        SearchTimedOut: `ends_at` was reached.
    """

    def __init__(
        self,
        channel: Channel,
        workload: Workload,
        strategies: Sequence[Strategy] = (),
        *,
        vram_budget: str | float | None = None,
        deadlines: Deadlines | None = None,
        ends_at: float = math.inf,
        on_stage: OnStage = ignore_stage,
    ) -> None:
        self.strategies, self.start_s = strategies, 0.0
        self._channel, self._workload = channel, workload
        self._deadlines, self._ends_at = deadlines or Deadlines(), ends_at
        self._looks = _Looks(strategies, self._deadlines)
        self._on_stage = on_stage
        self._lock: DeviceLock | None = None
        self._survey: Survey | None = None
        try:
            on_stage("starting a worker")
            device = self._open(ends_at)
            self.vram_budget_bytes = budget_bytes(
                vram_budget,
                total_bytes=device.total_bytes,
                free_bytes=device.free_bytes,
                is_cpu=device.exclusive_key is None,
            )
            if device.exclusive_key is not None:
                self._lock = DeviceLock(device.exclusive_key)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None where there is none."""
        return self._channel.pid

    def first_survey(self) -> Survey:
        """Return the facts of the workload on the device, before any look that takes a while.

        Raises:
            Exception: as of `survey`.
        """
        return self._surveyed(dict.fromkeys(self._looks.by_stage.values(), NO_TIME))

    def survey(
        self, *, looks_end_at: float = math.inf, recomputation: Recomputation | None = None
    ) -> Survey:
        """Return the facts of the workload on the device; they are looked up once.

        Args:
            looks_end_at: when strategies' looks end, by `time.monotonic`: what was not looked at by
                then is left out, with a note.
            recomputation: whether it may be needed; None: it may.

        Raises:
            InvalidArgument: the workload's functions make no model, optimizer or batch, or a
                strategy breaks the contract of plug-ins.
            Exception: what the user's code raised where no trial forward can report it.
        """
        if self._survey is None:
            self._survey = self._surveyed({}, looks_end_at, recomputation)
        return self._survey

    def _surveyed(
        self,
        left_out: dict[str, str],
        looks_end_at: float = math.inf,
        recomputation: Recomputation | None = None,
    ) -> Survey:
        """Return the survey without strategies whose looks lost a worker, one at a time.

        And without values on which ranks diverged: their workers are new ones, each time. Each time
        there is one look or value less, so that this ends.
        """
        raised: dict[tuple[str, Scalar], str | None] = {}
        self._looks.end_at = looks_end_at
        while True:
            look_up = partial(
                _survey,
                vram_budget_bytes=self.vram_budget_bytes,
                left_out=left_out,
                raised=raised,
                looks_s=max(0.0, looks_end_at - time.monotonic()),
                recomputation=recomputation,
            )
            try:
                survey = self._answer(Call(look_up, self.vram_budget_bytes), looks=self._looks)
                return note_own_copy(survey, self._workload)
            except Exception as error:
                _leave_out(error, left_out, raised)

    def probe(self, request: ProbeRequest) -> Reply:
        """Run one plan; a fault of the plan is an outcome, and costs at most its worker."""
        budget, ends_at = request.vram_budget_bytes or self.vram_budget_bytes, self._ends_at
        if request.seconds_left is not None:
            ends_at = min(ends_at, time.monotonic() + request.seconds_left)
        try:
            self._open(ends_at)
        except DeviceFull as full:
            return Reply(Measurement(Outcome.OOM, str(full), contended=True))
        began = time.monotonic()
        tries = list(self._tries(replace(request, vram_budget_bytes=budget), ends_at))
        reply, contended = tries[-1], any(each.measurement.contended for each in tries)
        if reply.exception is not None:
            note_tried(reply.exception, f"probing {request.plan}")
        took_s = time.monotonic() - began
        return replace(reply, value=replace(reply.value, contended=contended, seconds=took_s))

    def _tries(self, request: ProbeRequest, ends_at: float) -> Iterator[Reply]:
        """Yield what a plan came to each time that it ran.

        It runs again where other processes' use of the device moved, and once more where its size
        does not explain its end.
        """
        wait_s, may_repeat = self._deadlines.of(request.expected_seconds), True
        for _ in range(1 + MAX_REPEATS):
            self._open(ends_at)
            deadline = Deadline.after(wait_s, ends_at)
            try:
                reply = self._channel.call(
                    request, deadline, lambda stage: self._on_stage(f"{stage} {request.plan}")
                )
            except NoReply as lost:
                yield Reply(Measurement(lost.outcome, lost.detail))
                return
            if reply.spent:
                self._channel.drop()
            yield reply
            repeats = reply.measurement.contended or (reply.worth_repeating and may_repeat)
            if reply.spent or not repeats:
                return
            may_repeat = may_repeat and not reply.worth_repeating

    def compare(
        self,
        first: ResolvedPlan,
        second: ResolvedPlan,
        samples: int,
        vram_budget_bytes: int | None = None,
    ) -> Comparison:
        """Return how far loss and gradients of two plans on the same samples differ.

        Raises:
            InvalidArgument: the workload has a training_step, whose gradients cannot be compared.
            Exception: whatever the model or the device raises.
        """
        function = partial(_compare, first=first, second=second, samples=samples)
        return self.run(function, vram_budget_bytes)

    def run(
        self,
        function: Callable[[Any], _Result],
        vram_budget_bytes: int | None = None,
        expected_seconds: float | None = None,
    ) -> _Result:
        """Call `function(session)` where the workload and the device are; see `Call`.

        It is called again, once, if the worker or the device dies: the failure may be transient.

        Args:
            function: of a module, with `functools.partial` for further arguments.
            vram_budget_bytes: None: the prober's own budget.
            expected_seconds: how long it takes; None: unknown.

        Raises:
            WorkerFailed: the worker ended or hung instead of answering, or the device died.
            Exception: what the function raised, as it was raised.
        """
        call = Call(function, vram_budget_bytes or self.vram_budget_bytes)
        result: _Result = self._answer(call, expected_seconds)
        return result

    def _answer(
        self,
        call: Call,
        expected_seconds: float | None = None,
        looks: _Looks | None = None,
        *,
        may_repeat: bool = True,
    ) -> Any:
        """Return what a function returns, or raise what it raised; `run` says what else."""
        try:
            return self._answer_once(call, expected_seconds, looks)
        except NoReply as lost:
            if not may_repeat or lost.outcome is Outcome.TIMEOUT:
                raise WorkerFailed(lost.detail) from lost.__cause__
        return self._answer(call, expected_seconds, looks, may_repeat=False)

    def _answer_once(self, call: Call, expected_seconds: float | None, looks: _Looks | None) -> Any:
        """Return or raise likewise, and raise NoReply where the worker or the device died."""
        self._open(self._ends_at)
        deadline = Deadline.after(self._deadlines.of(expected_seconds), self._ends_at)
        on_stage = self._on_stage if looks is None else looks.bounding(deadline, self._on_stage)
        try:
            reply = self._channel.call(call, deadline, on_stage)
        except NoReply as lost:
            if looks is None or looks.now is None:
                raise
            raise StrategyLost(looks.now, looks.why_lost(lost)) from None
        if reply.spent:
            self._channel.drop()
        is_look = isinstance(reply.exception, StrategyLost)  # which its next look repeats
        if is_look or reply.exception is None or reply.device_fault is None:
            return reply.value_or_raise()
        raise NoReply(
            Outcome.POISONED,
            f"the device failed outside a probe, in a fresh worker too: {reply.device_fault}. A "
            "device-side assert is most often an index out of range in the model, the loss or the "
            "labels: run one training step on the CPU to see where",
        ) from reply.exception

    def renew(self) -> None:
        """Have the next request answered by a fresh worker; end what runs in another thread."""
        self._channel.drop()

    def close(self) -> None:
        """End the worker, and give the device back."""
        try:
            self._channel.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def _open(self, ends_at: float) -> DeviceFacts:
        had_none, began = self._channel.pid is None, time.monotonic()
        facts = self._channel.open(ends_at)
        if had_none:
            self.start_s = time.monotonic() - began
        return facts


class _Looks:
    """Follows surveys by their stages: whose look is under way, and how long it may take.

    Args:
        strategies: that look.
        deadlines: of the prober.

    Attributes:
        by_stage: stage of each look -> its name.
        end_at: when the looks end, by `time.monotonic`.
        now: the name of the look that is under way; None: something else is.
    """

    def __init__(self, strategies: Sequence[Strategy], deadlines: Deadlines) -> None:
        names = [*(strategy.name for strategy in strategies), SPLIT_GRADIENTS]
        self.by_stage = {stage_of(name): name for name in names}
        # What ranks cannot do without has no share of the time, but all of it
        self._needed = {each.name for each in strategies if each.phase is Phase.PARALLEL}
        self._unknown_s = self._look_s = deadlines.unknown_s
        self._deadlines = deadlines
        self.end_at = math.inf
        self.now: str | None = None
        self._share_s: float | None = None

    def why_lost(self, lost: NoReply) -> str:
        """Return how the look that is under way was lost."""
        if lost.outcome is not Outcome.TIMEOUT or self._share_s is None:
            return lost.detail
        return (
            f"its look took longer than its share of the timeout, {format_seconds(self._share_s)}"
        )

    def bounding(self, deadline: Deadline, on_stage: OnStage) -> OnStage:
        """Return `on_stage`, with each stage moving the deadline."""
        self.now, stage_before, began = None, "", time.monotonic()

        def moved(stage: str) -> None:
            nonlocal stage_before, began
            if stage == STILL_RUNNING:  # it moves no deadline
                return
            if stage_before == FIRST_SAMPLES:
                forward_s = time.monotonic() - began
                self._look_s = min(self._look_s, self._deadlines.of(FORWARDS_OF_A_LOOK * forward_s))
            stage_before, began = stage, time.monotonic()
            self.now = self.by_stage.get(stage)
            deadline.restart(self._seconds())
            on_stage(stage)

        return moved

    def _seconds(self) -> float:
        """Return the seconds that what is under way may take."""
        self._share_s = None
        if self.now is None:
            return self._unknown_s
        share_s = max(MIN_LOOK_S, SHARE_OF_A_LOOK * (self.end_at - time.monotonic()))
        if share_s < self._look_s and self.now not in self._needed:
            self._share_s = share_s
        return self._look_s if self._share_s is None else share_s


def open_prober(
    workload: Workload,
    strategies: Sequence[Strategy] = (),
    target: Target | None = None,
    *,
    deadlines: Deadlines | None = None,
    ends_at: float = math.inf,
    on_stage: OnStage = ignore_stage,
    executor: Executor | None = None,
) -> Prober:
    """Open a prober of that target; for the other arguments see `Prober`.

    Args:
        executor: in whose processes the worker runs; None: here.

    Raises:
        InvalidArgument: there is no such device, seed or budget; nothing was started by then.
        Exception: as `Prober` does.
    """
    target = target or Target()
    live = workload.model if isinstance(workload.model, torch.nn.Module) else None
    device = device_meant(target.device, live)
    check_budget(target.vram_budget)
    seed: Any = target.seed
    if not (isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= _LARGEST_SEED):
        raise InvalidArgument(
            f"seed must be a whole number from 0 to {_LARGEST_SEED}, got {seed!r}"
        )
    given: dict[str, Any] = {"device": device, "seed": seed}
    if executor is None:
        given["threads"] = target.threads
    channel: Channel
    if target.ranks > 1:
        from autofit.probing.rank_channel import RankChannel  # searches of one device have none

        given["device"] = target.device
        channel = RankChannel(target.ranks, workload, strategies, ends_at=ends_at, **given)
    elif executor is not None:
        from autofit.probing.executor_channel import ExecutorChannel  # most searches run here

        channel = ExecutorChannel(executor, workload, strategies, **given)
    else:
        start_server()  # writing a large workload takes seconds, too
        channel = WorkerChannel(workload, strategies, **given)
    return Prober(
        channel,
        workload,
        strategies,
        vram_budget=target.vram_budget,
        deadlines=deadlines,
        ends_at=ends_at,
        on_stage=on_stage,
    )


def _leave_out(
    error: Exception, left_out: dict[str, str], raised: dict[tuple[str, Scalar], str | None]
) -> None:
    """Add what an error of a survey is blamed on to what the next one leaves out.

    Raises:
        WorkerFailed: the worker was lost to what is no look.
        Exception: the error, if it is blamed on nothing that is not left out yet.
    """
    if isinstance(error, StrategyLost):
        if error.strategy in left_out:
            raise WorkerFailed(error.detail) from None
        left_out[error.strategy] = error.detail
        return
    under = blamed(error)
    if under is None or under in raised:
        note_tried(error, "looking the workload over")
        raise error
    raised[under] = None if isinstance(error, torch.OutOfMemoryError) else in_one_line(error)


def _compare(
    session: Workplace, first: ResolvedPlan, second: ResolvedPlan, samples: int
) -> Comparison:
    from autofit.equivalence.comparison import compare_plans  # in the worker alone

    return compare_plans(session.builder, first, second, samples)


def _survey(session: Workplace, **given: Any) -> Survey:
    from autofit.probing.looks import take_survey  # in the worker alone

    return take_survey(session, **given)
