"""A channel to a session in the user's own process, for what cannot be pickled.

Model and optimizer are trained in place and put back from a snapshot, before each request and at
the end. This process does not survive a hang, a crash or a poisoned device context, and a request
that runs cannot be ended when the search's time is over; a search with a worker process
(`autofit.probing.worker_channel`) survives all three, and ends it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType

import torch

from autofit.devices.open import notes_on_choice, open_device
from autofit.errors import SearchTimedOut
from autofit.probing.messages import Deadline, DeviceFacts, OnStage, Reply, Request
from autofit.probing.session import Session
from autofit.snapshot.objects import live_objects
from autofit.snapshot.snapshot import Snapshot
from autofit.strategy import Strategy
from autofit.training.workload import Workload


class InProcessChannel:
    """A channel to a session in this process; implements `autofit.probing.messages.Channel`.

    Args:
        workload, strategies, device, seed: as for `WorkerChannel`.

    Raises:
        InvalidRequest: there is no such kind of device.
        DeviceUnavailable: the device is not there.
    """

    is_replaceable = False
    pid = None
    environment: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        workload: Workload,
        strategies: Sequence[Strategy] = (),
        *,
        device: str | None = None,
        seed: int = 0,
    ) -> None:
        self._workload = workload
        self._device_fault: str | None = None
        self._answered = 0
        opened = self._device = open_device(device)
        self._borrowed = ExitStack()  # each goes back, whatever becomes of the others
        self._borrowed.callback(self._leave_device)
        try:
            self._facts = DeviceFacts.of(opened)
            self._borrowed.enter_context(_plain_modes())
            self._snapshot = Snapshot(live_objects(workload, but=("loader",)))
            notes = notes_on_choice(device)
            self._session = Session(self._restored, strategies, opened, seed=seed, notes=notes)
            self._spares_collections = gc.get_freeze_count() == 0  # else thawing undoes the user's
            if self._spares_collections:
                self._borrowed.callback(gc.unfreeze)
            self._spare_collections()
        except BaseException:
            self._borrowed.close()
            raise

    def open(self, ends_at: float = math.inf) -> DeviceFacts:
        """Return the facts of the device as it was when this channel opened it."""
        return self._facts

    def call(self, request: Request, deadline: Deadline, on_stage: OnStage) -> Reply:
        """Answer here, however long that takes, and put the user's objects back."""
        if deadline.ends_search and not deadline.seconds_left:
            raise SearchTimedOut("the time of the search is over")
        try:
            reply = self._session.answer(request, on_stage)
            self._device_fault = reply.device_fault
        finally:
            self._put_back()
        if self._answered == 0:
            self._spare_collections()  # of what the first training imported
        self._answered += 1
        fault = self._device_fault
        return reply if fault is None else replace(reply, spent=True, device_fault=fault)

    def drop(self) -> None:
        """Do nothing: there is only this process."""

    def close(self) -> None:
        """Put everything back, and the device as it was."""
        with self._borrowed:
            self._put_back()

    def _put_back(self) -> None:
        """Restore the user's objects; what lies on a device that died is lost with it."""
        try:
            self._snapshot.restore()
        except ExceptionGroup:
            self._device_fault = self._device_fault or self._session.device_fault()
            if self._device_fault is None:
                raise

    def _leave_device(self) -> None:
        try:
            self._device.close()
        except Exception:
            if self._device_fault is None:
                raise

    def _spare_collections(self) -> None:
        """Have collections around probes pass over what is there now: in a notebook, much."""
        if self._spares_collections:
            gc.collect()
            gc.freeze()

    def _restored(self) -> Workload:
        self._put_back()
        return self._workload


@contextmanager
def _plain_modes() -> Iterator[None]:
    """Enter the modes of a worker: a search may be called under `torch.no_grad` or autocast."""
    with torch.inference_mode(False), torch.enable_grad(), _no_autocast():
        yield


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Leave every autocast that the caller is in, and enter it again at the end.

    `torch.autocast(enabled=False)` is not enough: the cache of cast weights is dropped only with
    the outermost autocast, so a training inside another one would read outdated weights.
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
