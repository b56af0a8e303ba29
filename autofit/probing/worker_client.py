"""The parent's side of probing: one worker for a whole search, replaced when it must be."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autofit.devices.lock import DeviceLock
from autofit.equivalence.gradients import Comparison
from autofit.errors import DeviceUnavailable, WorkerFailed
from autofit.interrupts import interrupts_deferred
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan, VariantKey
from autofit.probing.faults import fault_of
from autofit.probing.messages import exception_from_dict, request_to_dict
from autofit.probing.prober import ProbeRequest
from autofit.probing.serialization import Payload, nameless_file, write_payload
from autofit.probing.survey import Survey, note_own_copy
from autofit.probing.worker_process import WorkerGone, WorkerProcess, WorkerSilent
from autofit.strategy import Strategy
from autofit.training.workload import Workload
from autofit.units import format_seconds

# How long a worker may take before it counts as hung.


@dataclass(frozen=True)
class Deadlines:
    """Bounds on what the parent waits for, in seconds.

    Attributes:
        start_s: for a worker to import torch and open the device.
        unknown_s: for what nobody can say the length of: the survey, a first probe.
        shortest_s: the least for any probe.
        patience: a probe may take this many times what it is expected to take.
    """

    start_s: float = 120.0
    unknown_s: float = 900.0
    shortest_s: float = 60.0
    patience: float = 20.0

    def of(self, request: ProbeRequest) -> float:
        """Seconds after which this probe counts as hung."""
        if request.expected_seconds is None:
            return self.unknown_s
        return max(self.shortest_s, self.patience * request.expected_seconds)


# How a worker died, and how many of them one plan may cost.

MOST_WORKERS_PER_PLAN = 3


@dataclass
class LostWorkers:
    """The workers that plans have cost; a variant with a plan that cost three is set aside."""

    _lost: Counter[Plan] = field(default_factory=Counter)
    _set_aside: dict[VariantKey, Measurement] = field(default_factory=dict)

    def note(self, plan: Plan, measurement: Measurement) -> None:
        """A probe of `plan` ended like this and cost its worker."""
        self._lost[plan] += 1
        if self._lost[plan] >= MOST_WORKERS_PER_PLAN:
            reason = (
                f"set aside: {MOST_WORKERS_PER_PLAN} workers were lost to {plan}, the last one "
                f"so: {measurement.detail}"
            )
            self._set_aside[plan.variant] = Measurement(measurement.outcome, reason)

    def set_aside_as(self, plan: Plan) -> Measurement | None:
        """What stands for a probe of a plan whose variant is set aside; None: run it."""
        return self._set_aside.get(plan.variant)


def outcome_of_death(returncode: int | None, kills_before: int | None) -> Outcome:
    """What a worker's end means.

    Args:
        returncode: negative for a signal.
        kills_before: `oom_kills()` when the probe began.
    """
    if returncode != -signal.SIGKILL:
        return Outcome.CRASHED
    kills = oom_kills()
    told_apart = kills is not None and kills_before is not None
    return Outcome.CRASHED if told_apart and kills == kills_before else Outcome.HOST_OOM


def words_of_death(returncode: int | None, printed: str) -> str:
    """How a worker ended, and what it printed last."""
    if returncode is None:
        how = "did not end when it was killed: it is inside a call of the driver"
    elif returncode < 0:
        how = f"was ended by {signal.Signals(-returncode).name}"
    else:
        how = f"exited with {returncode}"
    return f"the worker {how}" + (f"; it printed last:\n{printed}" if printed else "")


def oom_kills() -> int | None:
    """Processes that the kernel has killed for want of host memory; None: it does not say."""
    try:
        counters = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [int(line.split()[1]) for line in counters if line.startswith("oom_kill ")]
    return counts[0] if counts else None


_FAULTS_OF_A_WORKER = (Outcome.TIMEOUT, Outcome.CRASHED, Outcome.POISONED, Outcome.HOST_OOM)


class _NoRoom(DeviceUnavailable):
    """The device is full before anything is trained on it."""

    def __init__(self, said: str) -> None:
        super().__init__(
            f"the device has no room for a worker: {said}. Other processes hold nearly all of it: "
            "end them, or choose another device"
        )


class WorkerProber(AbstractContextManager["WorkerProber"]):
    """Probes a workload in a worker process; implements `autofit.probing.prober.Prober`.

    Args:
        workload: what is trained; this process only writes it to a file.
        strategies: those that may have settings in a plan.
        device: "cuda", "cuda:1", "cpu" or None: cuda where there is one.
        vram_budget: see `autofit.devices.base.budget_bytes`.
        seed: for everything random in a probe.
        deadlines: when a worker counts as hung.

    The worker is killed with the thread that started it (Linux ties it to that), so a prober is
    used from one thread.

    Raises:
        InvalidRequest: the workload cannot be pickled, or the budget cannot be read.
        DeviceUnavailable: the device is not there, is full, or another search is using it.
        WorkerFailed: the worker could not be started, or there is no room for the workload's file.
    """

    def __init__(
        self,
        workload: Workload,
        strategies: Sequence[Strategy] = (),
        *,
        device: str | None = None,
        vram_budget: str | float | None = None,
        seed: int = 0,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._workload = workload
        self._deadlines = deadlines or Deadlines()
        self._lost = LostWorkers()
        self._lock: DeviceLock | None = None
        self._opening = {
            "do": "open",
            "device": str(device) if device else None,  # a torch.device is no JSON
            "vram_budget": vram_budget,
            "seed": seed,
        }
        self._process: WorkerProcess | None = None
        self._user_exception: BaseException | None = None
        self._survey: Survey | None = None
        self.strategies = strategies
        self._file = nameless_file()
        path = Path(f"/dev/fd/{self._file.fileno()}")
        self._opening["payload"] = str(path)
        try:
            write_payload(Payload(workload, strategies), path)
            self._running()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def vram_budget_bytes(self) -> int:
        """The budget as the device resolved it."""
        return self.survey().vram_budget_bytes

    def survey(self) -> Survey:
        """The facts of the workload on the device; looked up once."""
        if self._survey is None:
            reply = self._ask({"do": "survey"}, timeout_s=self._deadlines.unknown_s)
            self._survey = note_own_copy(Survey.from_dict(reply["survey"]), self._workload)
            # What is free moves; a worker that replaces this one must hold to the same budget.
            self._opening["vram_budget"] = self._survey.vram_budget_bytes
        return self._survey

    def rebudget(self, vram_budget_bytes: int) -> None:
        """Hold the following probes to another budget."""
        if vram_budget_bytes != self.vram_budget_bytes:
            self._survey = replace(self.survey(), vram_budget_bytes=vram_budget_bytes)
            self._opening["vram_budget"] = vram_budget_bytes
            message = {"do": "rebudget", "vram_budget_bytes": vram_budget_bytes}
            self._ask(message, timeout_s=self._deadlines.unknown_s)

    def probe(self, request: ProbeRequest) -> Measurement:
        """Run one plan in the worker; a worker that dies or hangs costs this probe alone.

        A plan that has cost three workers is not given a fourth, and neither is its variant.

        Raises:
            WorkerFailed: a worker that was needed could not be started.
        """
        set_aside = self._lost.set_aside_as(request.plan)
        if set_aside is not None:
            return set_aside
        measurement = self._probe_in_worker(request)
        if self._process is None and measurement.outcome in _FAULTS_OF_A_WORKER:
            self._lost.note(request.plan, measurement)
        return measurement

    def _probe_in_worker(self, request: ProbeRequest) -> Measurement:
        message = {"do": "probe", "request": request_to_dict(request)}
        timeout_s = self._deadlines.of(request)
        try:
            process, kills = self._running(), oom_kills()
        except _NoRoom as full:
            return Measurement(Outcome.OOM, str(full), contended=True)
        began = time.monotonic()
        try:
            reply = self._exchange(process, message, timeout_s)
        except WorkerGone as gone:
            words = words_of_death(gone.returncode, process.last_words())
            outcome = outcome_of_death(gone.returncode, kills)
            return Measurement(outcome, words, seconds=time.monotonic() - began)
        except WorkerSilent as silent:
            words = f"no answer within {format_seconds(timeout_s)}; it hung here:\n{silent.stack}"
            return Measurement(Outcome.TIMEOUT, words, seconds=time.monotonic() - began)
        if reply["user_exception"] is not None:
            self._user_exception = exception_from_dict(reply["user_exception"])
        return Measurement.from_dict(reply["measurement"])

    def compare(self, first: ResolvedPlan, second: ResolvedPlan, samples: int) -> Comparison:
        """Loss and gradients of two plans on the same samples; raises as `WorkloadProber` says."""
        plans = [first.to_dict(), second.to_dict()]
        message = {"do": "compare", "plans": plans, "samples": samples}
        return Comparison.from_dict(
            self._ask(message, timeout_s=self._deadlines.unknown_s)["comparison"]
        )

    def user_exception(self) -> BaseException | None:
        """The exception behind the last `user_error`."""
        return self._user_exception

    def renew(self) -> None:
        """Have the next probe run in a fresh worker."""
        self._drop()

    def close(self) -> None:
        """End the worker, and let the payload and the device go."""
        with interrupts_deferred():
            self._drop()
            if self._lock is not None:
                self._lock.release()
            self._file.close()

    def _running(self) -> WorkerProcess:
        if self._process is None:
            self._process = WorkerProcess(self._file.fileno())
            try:
                opened = self._ask(self._opening, timeout_s=self._deadlines.start_s)
                self._claim(opened["exclusive_key"])
            except BaseException as error:
                self._drop()
                fault = fault_of(error)
                if fault.outcome is Outcome.OOM:
                    raise _NoRoom(fault.detail) from error
                raise
        return self._process

    def _claim(self, exclusive_key: str | None) -> None:
        """Hold the device for as long as this prober is open, also while workers are replaced."""
        if self._lock is None and exclusive_key is not None:
            self._lock = DeviceLock(exclusive_key)

    def _ask(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """A request that has no outcome but success."""
        process = self._running()
        try:
            return self._exchange(process, message, timeout_s)
        except WorkerGone as gone:
            raise WorkerFailed(words_of_death(gone.returncode, process.last_words())) from None
        except WorkerSilent as silent:
            raise WorkerFailed(
                f"the worker did not answer within {format_seconds(timeout_s)}; it hung here:\n"
                f"{silent.stack}\nIt printed last:\n{process.tail()}"
            ) from None

    def _exchange(
        self, process: WorkerProcess, message: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """The worker's reply; a worker that gave none, or is spent by it, is ended.

        Raises:
            WorkerGone, WorkerSilent: there was no reply.
            Exception: what the worker raised.
        """
        try:
            reply = process.ask(message, timeout_s=timeout_s)
        except BaseException:  # after a Ctrl-C it may answer later, to nobody
            self._drop()
            raise
        if reply["spent"]:
            self._drop()
        if "raised" in reply:
            raise exception_from_dict(reply["raised"])
        return reply

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
