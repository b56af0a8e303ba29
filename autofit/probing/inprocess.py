"""Probing in the user's own process, on the user's own objects: for what cannot be pickled.

Model and optimizer are trained in place and put back from a snapshot, before each probe and at the
end. A hang, a crash or a poisoned device context here is the whole process's; a worker process
(`autofit.probing.worker_client`) survives all three.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch

from autofit.devices.base import budget_bytes
from autofit.devices.lock import DeviceLock
from autofit.devices.open import open_device
from autofit.equivalence.gradients import Comparison
from autofit.errors import DeviceUnavailable, mark_users, users_code
from autofit.measurement import Measurement, Outcome
from autofit.plan import ResolvedPlan
from autofit.probing.messages import WorkerTraceback
from autofit.probing.prober import ProbeRequest
from autofit.probing.session import Session
from autofit.probing.survey import Survey
from autofit.snapshot.objects import live_objects
from autofit.snapshot.snapshot import Snapshot
from autofit.strategy import Strategy
from autofit.training.workload import Workload


class InProcessProber(AbstractContextManager["InProcessProber"]):
    """Probes a workload in this process; implements `autofit.probing.prober.Prober`.

    Args:
        workload, strategies, device, vram_budget, seed: as for `WorkerProber`.

    Raises:
        InvalidRequest: the budget cannot be read.
        DeviceUnavailable: the device is not there, or another search is using it.
    """

    def __init__(
        self,
        workload: Workload,
        strategies: Sequence[Strategy] = (),
        *,
        device: str | None = None,
        vram_budget: str | float | None = None,
        seed: int = 0,
    ) -> None:
        self._workload = workload
        self.strategies = strategies
        self._survey: Survey | None = None
        self._user_exception: BaseException | None = None
        self._poisoned_by: str | None = None
        self._lock: DeviceLock | None = None
        self._device = open_device(device)
        self._borrowed = ExitStack()  # each goes back, whatever becomes of the others
        self._borrowed.callback(self._leave_device)
        self._borrowed.enter_context(_plain_modes())
        try:
            self._begin(vram_budget, seed)
        except BaseException:
            self._borrowed.close()
            raise

    def _begin(self, vram_budget: str | float | None, seed: int) -> None:
        workload = self._workload
        self._snapshot = Snapshot.take(live_objects(workload))
        self._session = Session(
            self._restored,
            self.strategies,
            self._device,
            vram_budget_bytes=budget_bytes(
                vram_budget,
                total_bytes=self._device.total_bytes,
                free_bytes=self._device.free_bytes,
            ),
            seed=seed,
        )
        if (key := self._device.exclusive_key) is not None:
            self._lock = DeviceLock(key)
        self._spares_collections = gc.get_freeze_count() == 0  # else thawing would undo the user's
        if self._spares_collections:
            self._borrowed.callback(gc.unfreeze)
        self._spare_collections()

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def vram_budget_bytes(self) -> int:
        """The budget as the device resolved it."""
        return self._session.vram_budget_bytes

    def rebudget(self, vram_budget_bytes: int) -> None:
        """Hold the following probes to another budget."""
        self._session.vram_budget_bytes = vram_budget_bytes
        self._survey = replace(self.survey(), vram_budget_bytes=vram_budget_bytes)

    def survey(self) -> Survey:
        """The facts of the workload on the device; looked up once."""
        if self._survey is None:
            try:
                with users_code():
                    self._survey = self._session.survey()
            finally:
                self._put_back()
                self._spare_collections()  # of what the first training imported
            self._poisoned_by = self._session.broken_by()
        return self._survey

    def probe(self, request: ProbeRequest) -> Measurement:
        """Run one plan here.

        Raises:
            DeviceUnavailable: an earlier probe, or the survey, left the device beyond use.
        """
        if self._poisoned_by is not None:
            raise DeviceUnavailable(
                f"what ran earlier left the device beyond use ({self._poisoned_by}); restart the "
                'process, and use isolation="process", which survives this'
            )
        try:
            reply = self._session.probe(request)
            if reply.measurement.outcome is Outcome.POISONED:
                self._poisoned_by = reply.measurement.detail or "no detail"
        finally:
            self._put_back()
        if reply.exception is not None:
            mark_users(reply.exception)
            if reply.traceback:
                reply.exception.__cause__ = WorkerTraceback(reply.traceback)
            self._user_exception = reply.exception
        return reply.measurement

    def compare(self, first: ResolvedPlan, second: ResolvedPlan, samples: int) -> Comparison:
        """Loss and gradients of two plans on the same samples."""
        try:
            with users_code():
                return self._session.compare(first, second, samples)
        finally:
            self._put_back()
            self._poisoned_by = self._poisoned_by or self._session.broken_by()

    def user_exception(self) -> BaseException | None:
        """The exception behind the last `user_error`."""
        return self._user_exception

    def renew(self) -> None:
        """There is only this process."""

    def close(self) -> None:
        """Put everything back, and the device as it was."""
        with self._borrowed:
            self._put_back()

    def _put_back(self) -> None:
        """The user's objects as they were; what lies on a device that died is lost with it."""
        try:
            self._snapshot.restore()
        except ExceptionGroup:
            self._poisoned_by = self._poisoned_by or self._session.broken_by()
            if self._poisoned_by is None:
                raise

    def _leave_device(self) -> None:
        try:
            self._device.close()
        except Exception:
            if self._poisoned_by is None:
                raise
        finally:
            if self._lock is not None:
                self._lock.release()

    def _spare_collections(self) -> None:
        """Collections around probes pass over what is there now; in a notebook that is a lot."""
        if self._spares_collections:
            gc.collect()
            gc.freeze()

    def _restored(self) -> Workload:
        self._put_back()
        return self._workload


@contextmanager
def _plain_modes() -> Iterator[None]:
    """The modes of a worker's thread: a search may be called under `torch.no_grad` or autocast."""
    with torch.inference_mode(False), torch.enable_grad(), _no_autocast():
        yield


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Outside every autocast, also where the caller is in one.

    Entering `torch.autocast(enabled=False)` would not do: the cache of cast weights is dropped when
    the outermost autocast is left, so a training inside another one would read weights of the past.
    """
    depth = torch.autocast_increment_nesting() - 1
    enabled = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(depth):
            torch.autocast_increment_nesting()
        for kind, was in enabled.items():
            torch.set_autocast_enabled(kind, was)
