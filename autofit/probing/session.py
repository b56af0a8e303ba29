"""One workload on one device, in the worker that holds both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autofit.devices.base import Device, MemoryReading
from autofit.errors import (
    mark_users,
    never_release,
    raised_here,
    release_exception,
    traceback_text,
)
from autofit.measurement import Measurement, Outcome
from autofit.probing.faults import (
    Fault,
    fault_of,
    has_moved,
    is_explained,
    memory_was_short,
    only_libraries_went_over,
)
from autofit.probing.measure import measure
from autofit.probing.requests import Call, OnStage, ProbeRequest, Reply, ignore_stage
from autofit.strategy import ALONE, Strategy, World
from autofit.training.builder import TrainingBuilder
from autofit.training.workload import Workload

# More than this still allocated after a probe was cleaned up: the next one needs a new worker.
RETAINED_BYTES = 8 * 2**20


class Session:
    """A workload on a device.

    Args:
        fresh_workload: returns a copy of the workload that may be trained and thrown away.
        strategies: those that may have settings in a plan.
        device: held by this process.
        seed: for initial weights of built models, dropout and the like.
        world: the ranks that train together, of which this process is one.
        notes: what a reader of the report should know of the device.

    Attributes:
        builder: makes trainings of the workload on the device.
        strategies, notes: as given.
        on_stage: called by what runs here with the name of each stage that begins.
        looked_at: what a survey keeps for the next one.
    """

    looked_at: Any = None

    def __init__(
        self,
        fresh_workload: Callable[[], Workload],
        strategies: Sequence[Strategy],
        device: Device,
        *,
        seed: int = 0,
        world: World = ALONE,
        notes: Sequence[str] = (),
    ) -> None:
        self.builder = TrainingBuilder(fresh_workload, device, seed, world)
        self.strategies, self.notes = strategies, notes
        self.on_stage: OnStage = ignore_stage
        self._device = device

    def run(self, call: Call) -> Reply:
        """Call a function within its budget; what it raises is part of the reply."""
        value: object = None
        error: BaseException | None = None
        try:
            self._device.limit(call.vram_budget_bytes)
            value = call.function(self)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # a SystemExit of the user's is the user's error too
            error = raised
            if not raised_here(error):
                mark_users(error)
        fault = self.device_fault()
        return Reply(value, exception=error, spent=fault is not None, device_fault=fault)

    def probe(self, request: ProbeRequest) -> Reply:
        """Run one plan once; every way in which it can end is a reply."""
        self.builder.reclaim_or_not()
        if (broken := self.device_fault()) is not None:
            measurement = Measurement(Outcome.POISONED, broken)
            return Reply(measurement, spent=True, device_fault=broken)
        budget = request.vram_budget_bytes
        assert budget is not None  # the prober fills it in
        before, foreign_before = self._device.read(), self._device.foreign_bytes()
        measured, error, text, fault = None, None, None, None
        try:
            self._device.limit(budget)
            self._device.reset_peaks()
            measured = measure(self.builder, request, budget)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # a SystemExit of the user's is the user's error too
            error, text, fault = raised, traceback_text(raised), fault_of(raised)
        if error is not None and fault is not None:
            # Outside the except block, which itself keeps the exception and its frames alive.
            is_dead = fault.outcome is Outcome.POISONED or not self._synchronizes()
            (never_release if is_dead else release_exception)(error)
        self.builder.reclaim_or_not()
        is_explained = True
        if (broken := self.device_fault()) is not None:
            measured = Measurement(Outcome.POISONED, broken if fault is None else fault.detail)
        elif fault is not None:
            measured, is_explained = self._measured_of(fault, budget, before, foreign_before)
        assert measured is not None  # a probe without a fault measured something
        is_poisoned = measured.outcome is Outcome.POISONED
        is_users = error is not None and measured.outcome is Outcome.USER_ERROR
        if is_users and error is not None:
            mark_users(error)
        retained = self._allocated_unless_dead() - before.allocated_bytes
        kills = is_poisoned or (fault is not None and fault.kills_context)
        went_over = only_libraries_went_over(measured, before, budget)
        return Reply(
            measured,
            exception=error if is_users else None,
            traceback=text if is_users else None,
            spent=kills or retained > RETAINED_BYTES,
            device_fault=measured.detail or "no detail" if is_poisoned else None,
            worth_repeating=not is_explained or went_over,
            is_consequence=fault is not None and fault.is_consequence,
        )

    def device_fault(self) -> str | None:
        """Return how the device fails at a small computation now.

        None if it works, or is full.
        """
        try:
            self._device.check_health()
        except Exception as error:
            fault = fault_of(error)
            is_full = fault.outcome is Outcome.OOM and not fault.kills_context
            return None if is_full else fault.detail
        return None

    def _measured_of(
        self, fault: Fault, budget: int, before: MemoryReading, foreign_before: int | None
    ) -> tuple[Measurement, bool]:
        """Return what a fault means now that the device can be read, and if memory explains it."""
        after, foreign = self._device.read(), self._device.foreign_bytes()
        available = self._device.total_bytes - max(foreign or 0, foreign_before or 0)
        short = memory_was_short(before, after, vram_budget_bytes=budget, available_bytes=available)
        outcome = fault.outcome_where(memory_was_short=short)
        explained = outcome is not Outcome.OOM or is_explained(
            fault, after, vram_budget_bytes=budget
        )
        moved = has_moved(foreign_before, foreign, total_bytes=self._device.total_bytes)
        measurement = Measurement(
            outcome,
            fault.detail,
            peak_allocated_bytes=after.peak_allocated_bytes,
            peak_reserved_bytes=after.peak_reserved_bytes,
            non_torch_bytes=after.non_torch_bytes,
            contended=moved or (not explained and available < budget),
        )
        return measurement, explained

    def _synchronizes(self) -> bool:
        """Return whether the device still answers; unlike a health check, this takes no memory."""
        try:
            self._device.synchronize()
        except Exception:
            return False
        return True

    def _allocated_unless_dead(self) -> int:
        """Return the bytes in live tensors; 0 where the device is dead and raises."""
        try:
            return self._device.allocated_bytes()
        except Exception as error:
            release_exception(error)
            return 0
