"""Everything that is done to one workload on one device, in the process that holds both.

The worker process is a loop around a session; `isolation="inprocess"` uses one directly.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autofit.devices.base import Device, MemoryReading
from autofit.equivalence.gradients import Comparison, compare_plans
from autofit.errors import release_exception
from autofit.measurement import Measurement, Outcome
from autofit.plan import ResolvedPlan
from autofit.probing.faults import (
    Fault,
    fault_of,
    has_moved,
    is_explained,
    memory_was_short,
    only_libraries_went_over,
    settle,
    spilled,
)
from autofit.probing.measure import measure
from autofit.probing.prober import ProbeRequest
from autofit.probing.survey import Survey, look_over
from autofit.strategy import Strategy
from autofit.training.builder import TrainingBuilder
from autofit.training.training import Training
from autofit.training.workload import Workload

RETAINED_BYTES = 8 * 2**20
"""More than this still allocated after a probe was cleaned up: the next one needs a new worker."""
MOST_REPEATS = 2
"""Times that a contended probe is run again; one whose size may not be to blame, once."""


@dataclass(frozen=True)
class Reply:
    """A measurement, and what the session's owner must do about it.

    Attributes:
        measurement: the result.
        exception: what the user's code raised, for outcome user_error, cleared of its frames.
        traceback: its traceback, as text.
        spent: the process should not run another probe.
        worth_repeating: its size may not be to blame: it ran out of memory where live tensors and
            the request would have fitted, or went over the budget by the libraries it loaded.
    """

    measurement: Measurement
    exception: BaseException | None = None
    traceback: str | None = None
    spent: bool = False
    worth_repeating: bool = False


class Session:
    """A workload on a device within a budget.

    Args:
        fresh_workload: a copy of the workload that may be trained and thrown away, each time.
        strategies: those that may have settings in a plan.
        device: held by this process.
        vram_budget_bytes: the budget.
        seed: for initial weights of built models, dropout and the like.
    """

    def __init__(
        self,
        fresh_workload: Callable[[], Workload],
        strategies: Sequence[Strategy],
        device: Device,
        *,
        vram_budget_bytes: int,
        seed: int = 0,
    ) -> None:
        self._bench = TrainingBuilder(fresh_workload, device, seed)
        self.strategies = strategies
        self._device = device
        self.vram_budget_bytes = vram_budget_bytes

    def survey(self) -> Survey:
        """Look the workload over, within the budget; see `Survey`."""
        self._device.limit(self.vram_budget_bytes)
        return look_over(self._bench, self.strategies, self.vram_budget_bytes)

    def probe(self, request: ProbeRequest) -> Reply:
        """Run one plan; every way in which it can end is a reply.

        A probe during which other processes' use of the device moved is run again, and so is one
        whose end its size does not explain.
        """
        started = time.monotonic()
        reply = self._probe_once(request)
        contended, doubted = reply.measurement.contended, False
        for _ in range(MOST_REPEATS):
            again = reply.measurement.contended or (reply.worth_repeating and not doubted)
            if reply.spent or not again:
                break
            doubted = doubted or reply.worth_repeating
            reply = self._probe_once(request)
            contended = contended or reply.measurement.contended
        seconds = time.monotonic() - started
        measurement = replace(reply.measurement, contended=contended, seconds=seconds)
        return replace(reply, measurement=measurement)

    def compare(self, first: ResolvedPlan, second: ResolvedPlan, samples: int) -> Comparison:
        """Loss and gradients of two plans on the same samples, within the budget.

        Raises:
            Whatever the model or the device raises.
        """
        self._device.limit(self.vram_budget_bytes)
        return compare_plans(self._bench, first, second, samples)

    def broken_by(self) -> str | None:
        """How the device fails at a small computation now; None: it answers."""
        broken = self._health_fault()
        return None if broken is None else broken.detail

    def _probe_once(self, request: ProbeRequest) -> Reply:
        self._bench.reclaim_or_not()
        if (broken := self._health_fault()) is not None:
            return Reply(Measurement(broken.outcome, broken.detail), spent=True)
        before, foreign_before = self._device.read(), self._foreign_bytes()
        measurement, fault, raised = self._attempt(request)
        self._bench.reclaim_or_not()
        foreign = self._foreign_bytes()
        available = self._device.total_bytes - max(foreign or 0, foreign_before or 0)
        unexplained = False
        if fault is not None:
            measurement, unexplained = self._after_fault(fault, before, available)
        elif (broken := self._health_fault()) is not None:
            measurement = Measurement(broken.outcome, broken.detail)
        assert measurement is not None  # an attempt without a fault measured something
        moved = has_moved(foreign_before, foreign, total_bytes=self._device.total_bytes)
        crowded = unexplained and available < self.vram_budget_bytes
        measurement = replace(
            spilled(measurement, available_bytes=available), contended=moved or crowded
        )
        poisoned = measurement.outcome is Outcome.POISONED
        kills = poisoned or (fault is not None and fault.kills_context)
        is_users = measurement.outcome is Outcome.USER_ERROR
        return Reply(
            measurement,
            exception=raised[0] if raised and is_users else None,
            traceback=raised[1] if raised and is_users else None,
            spent=kills or self._retained(before) > RETAINED_BYTES,
            worth_repeating=unexplained
            or only_libraries_went_over(measurement, before, self.vram_budget_bytes),
        )

    def _attempt(
        self, request: ProbeRequest
    ) -> tuple[Measurement | None, Fault | None, tuple[BaseException, str] | None]:
        """Run the plan; whatever was raised is cleared of its frames before this returns."""
        try:
            return self._measure(request), None, None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a SystemExit of the user's is the user's error too
            raised, text, fault = error, traceback.format_exc(), fault_of(error)
        # Outside the except block nothing keeps the failing frames alive but the traceback.
        release_exception(raised)
        return None, fault, (raised, text)

    def _measure(self, request: ProbeRequest) -> Measurement:
        self._device.limit(self.vram_budget_bytes)
        self._device.reset_peaks()
        workload = self._bench.fresh_workload()

        def make_training(workload: Workload) -> Training:
            return self._bench.training(workload, request.resolved)

        return measure(workload, self._device, request, make_training, self.vram_budget_bytes)

    def _after_fault(
        self, fault: Fault, before: MemoryReading, available_bytes: int
    ) -> tuple[Measurement, bool]:
        """What the fault means now that the device can be looked at; whether it is unexplained."""
        if self._health_fault() is not None:
            settled = settle(fault, healthy=False)
            return Measurement(settled.outcome, settled.detail), False
        after, budget = self._device.read(), self.vram_budget_bytes
        short = memory_was_short(
            before, after, vram_budget_bytes=budget, available_bytes=available_bytes
        )
        settled = settle(fault, healthy=True, memory_was_short=short)
        measurement = Measurement(
            settled.outcome,
            settled.detail,
            peak_allocated_bytes=after.peak_allocated_bytes,
            peak_reserved_bytes=after.peak_reserved_bytes,
            non_torch_bytes=after.non_torch_bytes,
        )
        explained = is_explained(fault, after, vram_budget_bytes=budget)
        return measurement, settled.outcome is Outcome.OOM and not explained

    def _foreign_bytes(self) -> int | None:
        """What other processes hold; a dead device cannot be asked."""
        try:
            return self._device.foreign_bytes()
        except Exception as error:
            release_exception(error)
            return None

    def _retained(self, before: MemoryReading) -> int:
        """Bytes that outlived the probe; a dead device cannot be asked."""
        try:
            return self._device.read().allocated_bytes - before.allocated_bytes
        except Exception as error:
            release_exception(error)
            return 0

    def _health_fault(self) -> Fault | None:
        """How the device fails at a small computation; one that is full, and says so, is alive."""
        try:
            self._device.check_health()
        except Exception as error:
            fault = fault_of(error)
            answers = fault.outcome is Outcome.OOM and not fault.kills_context
            return None if answers else replace(fault, outcome=Outcome.POISONED, kills_context=True)
        return None
