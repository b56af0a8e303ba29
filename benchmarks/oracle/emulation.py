"""What a plan needs on an emulated GPU: it runs there in workers, under lower and lower limits.

The workers are those that probes run in, and torch's own allocator says what fits. Each runs one
plan once, as a user's process does: what an earlier run leaves behind decides which of two equal
blocks is taken, and with it whether a limit is enough. Sizes that the emulated cuDNN tells are
estimates; `Look.estimates` names them.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

import emulated_gpu
from autofit.devices.gpu_catalogue import Gpu
from autofit.errors import PredictionUnavailable
from autofit.memory.allocator import OWN_SEGMENT_ROUNDING_BYTES as PAGE_BYTES, round_up
from autofit.plan import ResolvedPlan
from autofit.probing.prober import Prober
from autofit.probing.requests import DeviceFacts
from autofit.probing.worker_channel import WorkerChannel
from autofit.strategy import Strategy
from autofit.training.workload import Workload
from benchmarks.oracle.look import Look, ValuesAsked, look
from emulated_gpu import Card, Machine, new_machine

ROOM = 16
"""Where a plan does not run in the memory of its GPU, it runs in that of so many."""
_SLACK_BYTES = PAGE_BYTES // 4  # the allocator takes whole pages


@dataclass(frozen=True)
class Emulated:
    """What a plan needs on an emulated GPU.

    Attributes:
        ample: how it ran with all memory that it asked for.
        limit_bytes: the smallest limit of the allocator under which it ran without a flush in its
            last steps.
        computed_values: whether operators computed.
    """

    ample: Look
    limit_bytes: int
    computed_values: bool


def card_of(gpu: Gpu) -> Card:
    """Return the emulated card that is like a GPU of autofit's table."""
    return Card(
        f"NVIDIA {gpu.name}",
        gpu.total_bytes,
        gpu.capability,
        gpu.multiprocessors,
        gpu.context_bytes,
    )


class _Channel(WorkerChannel):
    """To a worker on a GPU that no other process can find, so that there is nothing to lock.

    Attributes:
        environment: variables of the worker besides those of this process.
    """

    environment: Mapping[str, str] = MappingProxyType({})

    def open(self, ends_at: float = math.inf) -> DeviceFacts:
        """Start the worker, and have it open the device."""
        with _variables(self.environment):
            return replace(super().open(ends_at), exclusive_key=None)


@contextmanager
def _variables(given: Mapping[str, str]) -> Iterator[None]:
    """Have a process that is started inside see these variables, and the modules they name."""
    before, path = dict(os.environ), list(sys.path)
    os.environ.update(given)
    sys.path[:0] = filter(None, given.get("PYTHONPATH", "").split(os.pathsep))
    try:
        yield
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(before)


@cache
def _machine() -> Machine:
    """Return the one of this process: workers with the same variables share a process's import."""
    return new_machine()


class Emulation(AbstractContextManager["Emulation"]):
    """A workload in workers on an emulated GPU.

    Args:
        workload: model, sample batch, loss and optimizer.
        strategies: those that may have settings in a plan.
        gpu: the GPU.
        values: whether operators compute; they do from the first time that the training asks.
            Those of integers, booleans and single numbers always do.
        may_compute: whether they may; False: a training that asks for a value raises `ValuesAsked`.

    Attributes:
        values: whether they do.

    Raises (its methods):
        emulated_gpu.Unavailable: there can be no emulated GPU here.
        WorkerFailed: the worker ended or hung instead of answering.
        ValuesAsked: the training asked for a value, and nothing may compute.
        Exception: raised by the user's own code.
    """

    def __init__(
        self,
        workload: Workload,
        strategies: Sequence[Strategy],
        gpu: Gpu,
        *,
        values: bool = False,
        may_compute: bool = True,
    ) -> None:
        self.values, self._may_compute = values, may_compute
        self._roomy = False  # whether the card has `ROOM` times the GPU's memory
        self._workload, self._strategies = workload, strategies
        self._card = card_of(gpu)
        self._prober: Prober | None = None

    def __exit__(self, *raised: object) -> None:
        self._end()
        _machine().remove()

    def look(self, resolved: ResolvedPlan, limit_bytes: int | None = None) -> Look:
        """Run the plan in a fresh worker under a limit of the allocator; None: the GPU's memory."""
        self._end()
        given = None if limit_bytes is None else limit_bytes + _SLACK_BYTES
        run = partial(look, resolved=resolved, limit_bytes=given)
        try:
            return self.worker().run(partial(run, values=self.values))
        except ValuesAsked:
            if not self._may_compute:
                raise
            self._restart(values=True)
            return self.worker().run(partial(run, values=True))

    def ample(self, resolved: ResolvedPlan) -> Look:
        """Run the plan in as much memory as it asks for, on a larger card where need be."""
        found = self.look(resolved)
        if found.failure is not None and not self._roomy:
            self._restart(roomy=True)
            found = self.look(resolved)
        return found

    def need(self, resolved: ResolvedPlan, near_bytes: int | None = None) -> Emulated:
        """Return what a plan needs.

        Args:
            resolved: the plan.
            near_bytes: where the search for the limit begins. Where room for a workspace decides
                how much a convolution takes, a training may run under one limit, not under a
                larger one, and again from a still larger one on: then the limit found is that
                which is nearest. None: just below peak reserved.

        Raises:
            PredictionUnavailable: it does not run in `ROOM` times the GPU's memory.
        """
        ample = self.ample(resolved)
        if ample.failure is not None:
            raise PredictionUnavailable(
                f"{resolved.plan} does not run in {ROOM} times the memory of the GPU, the most "
                f"that is emulated: {ample.failure}"
            )
        return Emulated(ample, self._smallest_limit(resolved, ample, near_bytes), self.values)

    def _smallest_limit(self, resolved: ResolvedPlan, ample: Look, near_bytes: int | None) -> int:
        """Return the smallest limit, in whole pages and to 0.1 %, under which looks are steady."""
        works = round_up(ample.peak_reserved_bytes, PAGE_BYTES)
        fails = ample.peak_allocated_bytes // PAGE_BYTES * PAGE_BYTES - PAGE_BYTES
        at = works - PAGE_BYTES  # most plans need what they reserve, or hardly less
        if near_bytes is not None:
            at = round_up(near_bytes, PAGE_BYTES)
        stride = resolution = max(PAGE_BYTES, works // 1000 // PAGE_BYTES * PAGE_BYTES)
        while works - fails > resolution:
            at = min(max(at, fails + PAGE_BYTES), works - PAGE_BYTES)
            found = self.look(resolved, at)
            works, fails = (at, fails) if found.is_steady else (works, at)
            middle = (works + fails) // 2 // PAGE_BYTES * PAGE_BYTES
            at = max(works - stride, middle) if found.is_steady else min(fails + stride, middle)
            stride *= 2
        return works

    def worker(self) -> Prober:
        """Return the prober of the worker, which is started where there is none."""
        if self._prober is None:
            card = self._card
            if self._roomy:
                card = replace(card, total_bytes=ROOM * card.total_bytes)
            channel = _Channel(self._workload, self._strategies, device="cuda")
            channel.environment = emulated_gpu.environment(
                [card], machine=_machine(), values=self.values or "integers"
            ) | {"CUDA_VISIBLE_DEVICES": "0"}
            self._prober = Prober(channel, self._workload, self._strategies, vram_budget=1.0)
        return self._prober

    def _restart(self, *, values: bool | None = None, roomy: bool | None = None) -> None:
        self._end()
        self.values = self.values if values is None else values
        self._roomy = self._roomy if roomy is None else roomy

    def _end(self) -> None:
        prober, self._prober = self._prober, None
        if prober is not None:
            prober.close()
