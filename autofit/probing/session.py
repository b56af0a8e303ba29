"""Everything that is done to one workload on one device, in the process that holds both.

The worker process is a loop around a session; `isolation="inprocess"` uses one directly.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autofit.batching import describe
from autofit.devices.base import Device, MemoryReading
from autofit.errors import NoFeasiblePlan
from autofit.fingerprint import fingerprint
from autofit.measurement import Measurement, Outcome
from autofit.plan import Dimension, Plan
from autofit.probing.comparison import (
    SAMPLES_OF_A_COMPARISON,
    Comparison,
    Gradients,
    compare,
    gradients,
)
from autofit.probing.doubt import has_moved, is_explained, memory_was_short, spilled
from autofit.probing.faults import Fault, fault_of, settle
from autofit.probing.measure import measure
from autofit.probing.prober import ProbeRequest
from autofit.probing.scrub import collect, scrub
from autofit.probing.survey import Survey
from autofit.strategy import Capabilities, Strategy
from autofit.training import Training
from autofit.units import format_bytes
from autofit.workload import Workload

RETAINED_BYTES = 8 * 2**20
"""More than this still allocated after a probe was cleaned up: the next one needs a new worker."""
MOST_REPEATS = 2
"""Times that a contended probe is run again; an out-of-memory error that may be luck, once."""


@dataclass(frozen=True)
class Reply:
    """A measurement, and what the session's owner must do about it.

    Attributes:
        measurement: the result.
        exception: what the user's code raised, for outcome user_error, cleared of its frames.
        traceback: its traceback, as text.
        spent: the process should not run another probe.
        unexplained: it ran out of memory where live tensors and the request would have fitted.
    """

    measurement: Measurement
    exception: BaseException | None = None
    traceback: str | None = None
    spent: bool = False
    unexplained: bool = False


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
        self._fresh_workload = fresh_workload
        self._strategies = strategies
        self._device = device
        self.vram_budget_bytes = vram_budget_bytes
        self._seed = seed

    def survey(self) -> Survey:
        """Look the workload over; see `Survey`."""
        workload = self._fresh_workload()
        with self._training(workload, Plan(1)) as training:
            model, optimizer = training.model, training.optimizer
            digest = fingerprint(workload, model, optimizer, self._device.environment)
            parameters = list(model.parameters())
        loss = self._loss_source()
        dimensions, notes = self._dimensions()
        resplit, may_resplit, resplit_notes = self._resplit(workload)
        return Survey(
            environment=self._device.environment,
            vram_budget_bytes=self.vram_budget_bytes,
            fingerprint=digest,
            parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            loss=loss,
            sample_batch_size=workload.sample_batch_size,
            sample_shapes=describe(workload.batch(workload.sample_batch_size)),
            global_batch=workload.global_batch,
            resplit=resplit,
            may_resplit=may_resplit,
            dimensions=dimensions,
            notes=(*notes, *resplit_notes),
        )

    def probe(self, request: ProbeRequest) -> Reply:
        """Run one plan; every way in which it can end is a reply.

        A probe during which other processes' use of the device moved is run again, and so is an
        out-of-memory error that live tensors and the request do not explain.
        """
        started = time.monotonic()
        reply = self._probe_once(request)
        contended, was_oom = reply.measurement.contended, False
        for _ in range(MOST_REPEATS):
            again = reply.measurement.contended or (reply.unexplained and not was_oom)
            if reply.spent or not again:
                break
            was_oom = was_oom or reply.unexplained
            reply = self._probe_once(request)
            contended = contended or reply.measurement.contended
        seconds = time.monotonic() - started
        measurement = replace(reply.measurement, contended=contended, seconds=seconds)
        return replace(reply, measurement=measurement)

    def compare(
        self, first: Plan, second: Plan, payloads: Sequence[Mapping[str, Any]], samples: int
    ) -> Comparison:
        """Loss and gradients of two plans on the same samples.

        Raises:
            Whatever the model or the device raises.
        """
        try:
            return self._compare(first, second, payloads, samples, calm=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # some models have a loss in training mode only
            return self._compare(first, second, payloads, samples, calm=False)

    # -- building ------------------------------------------------------------------------------

    def _training(
        self, workload: Workload, plan: Plan, payloads: Mapping[str, Any] | None = None
    ) -> Training:
        torch.manual_seed(self._seed)
        model = self._device.place_model(workload.build_model())
        return Training(
            model,
            workload.build_optimizer(model),
            workload.recipe,
            plan,
            device=self._device.torch_device,
            strategies=self._strategies,
            payloads=payloads,
            place=self._device.place,
        )

    # -- probing -------------------------------------------------------------------------------

    def _probe_once(self, request: ProbeRequest) -> Reply:
        self._settle_memory_or_not()
        if (broken := self._health_fault()) is not None:
            return Reply(Measurement(broken.outcome, broken.detail), spent=True)
        before, foreign_before = self._device.read(), self._device.foreign_bytes()
        measurement, fault, raised = self._attempt(request)
        self._settle_memory_or_not()
        foreign = self._device.foreign_bytes()
        available = self._device.total_bytes - max(foreign or 0, foreign_before or 0)
        unexplained = False
        if fault is not None:
            measurement, unexplained = self._after_fault(fault, before, available)
        elif (broken := self._health_fault()) is not None:
            measurement = Measurement(broken.outcome, broken.detail)
        assert measurement is not None  # an attempt without a fault measured something
        moved = has_moved(foreign_before, foreign, total_bytes=self._device.total_bytes)
        measurement = replace(spilled(measurement, available_bytes=available), contended=moved)
        poisoned = measurement.outcome is Outcome.POISONED
        kills = poisoned or (fault is not None and fault.kills_context)
        is_users = measurement.outcome is Outcome.USER_ERROR
        return Reply(
            measurement,
            exception=raised[0] if raised and is_users else None,
            traceback=raised[1] if raised and is_users else None,
            spent=kills or self._retained(before) > RETAINED_BYTES,
            unexplained=unexplained,
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
        scrub(raised)
        return None, fault, (raised, text)

    def _measure(self, request: ProbeRequest) -> Measurement:
        self._device.limit(self.vram_budget_bytes)
        self._device.reset_peaks()
        workload = self._fresh_workload()

        def make_training(workload: Workload) -> Training:
            return self._training(workload, request.plan, request.payloads)

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

    def _retained(self, before: MemoryReading) -> int:
        """Bytes that outlived the probe; a dead device cannot be asked."""
        try:
            return self._device.read().allocated_bytes - before.allocated_bytes
        except Exception as error:
            scrub(error)
            return 0

    def _health_fault(self) -> Fault | None:
        try:
            self._device.check_health()
        except Exception as error:
            return replace(fault_of(error), outcome=Outcome.POISONED, kills_context=True)
        return None

    def _settle_memory(self) -> None:
        collect()
        self._device.synchronize()
        self._device.release_cache()

    def _settle_memory_or_not(self) -> None:
        """After a fault even emptying the cache may raise; the health check then says so."""
        try:
            self._settle_memory()
        except Exception as error:
            scrub(error)

    # -- surveying -----------------------------------------------------------------------------

    def _loss_source(self) -> str | None:
        workload = self._fresh_workload()
        if workload.train_step is not None:
            return "train_step"
        samples = min(workload.sample_batch_size, 2)
        try:
            with self._training(workload, Plan(samples)) as training, training.context():
                batch, _ = next(iter(training.micro_batches(workload.batch(samples))))
                return workload.recipe.loss_and_source(training.model, batch)[1].value
        except Exception as error:  # the baseline's probe will meet it and report it in full
            scrub(error)
            return None

    def _dimensions(self) -> tuple[dict[str, Dimension], list[str]]:
        dimensions: dict[str, Dimension] = {}
        notes = []
        for strategy in self._strategies:
            context = _Context(self)
            try:
                dimensions |= strategy.dimensions(context)
            except Exception as error:
                scrub(error)
                notes.append(f"{strategy.name} left out: {type(error).__name__}: {error}")
            finally:
                context.close()
                self._settle_memory_or_not()
        return dimensions, notes

    def _resplit(self, workload: Workload) -> tuple[Comparison | None, bool, list[str]]:
        """Whether a split batch trains like a whole one, tried on a few samples."""
        if workload.global_batch is None or workload.global_batch == 1:
            return None, True, []
        if workload.train_step is not None:
            note = "accumulation stays at the baseline's: train_step decides how a batch is split"
            return None, workload.allow_resplit, [] if workload.allow_resplit else [note]
        samples = SAMPLES_OF_A_COMPARISON
        whole, split = Plan(samples), Plan.split(samples, -(-samples // 2))
        try:
            comparison = self.compare(whole, split, ({}, {}), samples)
        except Exception as error:
            scrub(error)
            note = f"split and whole gradients could not be compared ({type(error).__name__})"
            return None, workload.allow_resplit, [note]
        finally:
            self._settle_memory_or_not()
        if comparison.equal:
            return comparison, True, []
        return comparison, workload.allow_resplit, [_resplit_note(comparison, workload)]

    def _compare(
        self,
        first: Plan,
        second: Plan,
        payloads: Sequence[Mapping[str, Any]],
        samples: int,
        *,
        calm: bool,
    ) -> Comparison:
        batch = self._fresh_workload().batch(samples)
        passes: list[Gradients] = []
        for plan, payload in zip((first, second), payloads, strict=True):
            with self._training(self._fresh_workload(), plan, payload) as training:
                passes.append(gradients(training, batch, seed=self._seed, calm=calm))
                model = training.model
        return compare(passes[0], passes[1], model)


def _resplit_note(comparison: Comparison, workload: Workload) -> str:
    what = f"split gradients differ from whole ones by {comparison.gradient:.1%}"
    where = f" ({', '.join(comparison.modules)})" if comparison.modules else ""
    kept = (
        "allow_resplit was given, so the accumulation count is free"
        if workload.allow_resplit
        else "the accumulation count stays at the baseline's; give loss_weight or allow_resplit"
    )
    return f"{what}{where}: {kept}"


class _Context:
    """What a strategy sees while it makes its dimensions; implements `autofit.strategy.Context`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._training: Training | None = None

    @property
    def device(self) -> torch.device:
        return self._session._device.torch_device

    @property
    def capabilities(self) -> Capabilities:
        return self._session._device.capabilities

    @property
    def model(self) -> torch.nn.Module:
        if self._training is None:
            self._training = self._session._training(self._session._fresh_workload(), Plan(1))
        return self._training.model

    def profile(self, run: Callable[[Any, Any], Any], micro_batch: int) -> Any:
        workload = self._session._fresh_workload()
        with self._session._training(workload, Plan(micro_batch)) as training:
            ((batch, _),) = training.micro_batches(workload.batch(micro_batch))
            return run(training, batch)

    def close(self) -> None:
        if self._training is not None:
            self._training.undo()
            self._training = None


def check_weights_fit(survey: Survey) -> None:
    """Refuse a budget that not even the weights fit into.

    Raises:
        NoFeasiblePlan: the model's parameters alone are larger than the budget.
    """
    if survey.parameter_bytes <= survey.vram_budget_bytes:
        return
    raise NoFeasiblePlan(
        f"the model's parameters alone take {format_bytes(survey.parameter_bytes)}, and the VRAM "
        f"budget is {format_bytes(survey.vram_budget_bytes)}",
        plan=Plan(1),
        required_bytes=survey.parameter_bytes,
        allowed_bytes=survey.vram_budget_bytes,
    )
