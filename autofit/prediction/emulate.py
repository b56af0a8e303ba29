"""Prediction by emulation: plans run in a worker on an emulated GPU, under lower and lower limits.

The worker is the one that a probe runs in, and torch's own allocator says what fits. What it is
told by the emulated cuDNN are estimates; `error_bounds` says how far off they may be.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autofit.devices.gpus import Gpu
from autofit.emulation.card import emulated_card
from autofit.emulation.launch import emulated_environment, new_machine
from autofit.errors import CannotTell
from autofit.memory.blocks import OWN_SEGMENT_ROUNDING_BYTES as PAGE_BYTES, round_up
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.emulated_look import Look, ValuesAsked, look
from autofit.probing.messages import DeviceFacts
from autofit.probing.prober import Prober
from autofit.probing.worker_channel import WorkerChannel
from autofit.registry import resolve
from autofit.strategy import Strategy
from autofit.training.workload import Workload

ROOM = 16
"""Where a plan does not run in the memory of its GPU, it runs in that of so many."""
_SLACK_BYTES = PAGE_BYTES // 4  # the allocator takes whole pages
_ERRORS = {
    "": (-0.0007, 0.0055),
    "cuDNN: a graph without a convolution": (-0.0007, 0.0055),
    "cuDNN: workspaces of convolutions in half precision": (-0.0142, 0.0376),
    "cuDNN: workspaces of convolutions in float32": (-0.0820, 0.0631),
}
"""By what was estimated, the least and the largest error of required bytes against the recordings
of an H200, as shares of the recorded bytes (benchmarks/results/2026-11-22-emulat*.json). Recorded
bytes were bisected to 1 %: without estimates, only errors of equal bisections count.
Any other estimate counts as the last of them, the widest: no recording tells."""


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

    @property
    def required_bytes(self) -> int:
        """The smallest VRAM budget under which it ran."""
        return self.limit_bytes + self.ample.non_torch_bytes

    @property
    def interval(self) -> tuple[int, int]:
        """The smallest and the largest that required bytes may be on the real GPU."""
        least, most = error_bounds(self.ample.estimates)
        outside = self.ample.non_torch_bytes
        return (
            math.floor(self.limit_bytes / (1 + most)) + outside,
            math.ceil(self.limit_bytes / (1 + least)) + outside,
        )


def error_bounds(estimates: Sequence[str]) -> tuple[float, float]:
    """Return the least and the largest error of required bytes, as shares of what is needed.

    Args:
        estimates: which sizes the process was told are not NVIDIA's.
    """
    widest = list(_ERRORS.values())[-1]
    bounds = [_ERRORS[""]] + [
        next((bound for name, bound in _ERRORS.items() if name and each.startswith(name)), widest)
        for each in estimates
        if not each.startswith("no values")
    ]
    return min(low for low, _ in bounds), max(high for _, high in bounds)


class _Channel(WorkerChannel):
    """To a worker on a GPU that no other process can find, so that there is nothing to lock."""

    def open(self, ends_at: float = math.inf) -> DeviceFacts:
        """Start the worker, and have it open the device."""
        return replace(super().open(ends_at), exclusive_key=None)


class Emulation(AbstractContextManager["Emulation"]):
    """A workload in a worker on an emulated GPU, which is started when it is first needed.

    Args:
        workload: model, sample batch, loss and optimizer.
        strategies: those that may have settings in a plan.
        gpu: the GPU.
        values: whether operators compute; they do from the first time that the training asks.
        may_compute: whether they may begin to; else `look` raises ValuesAsked.
        roomy: whether the card has `ROOM` times the GPU's memory.

    Attributes:
        values: whether they do.
        looks: how many were made.

    Raises (its methods):
        EmulationUnavailable: there can be no emulated GPU here.
        WorkerFailed: the worker ended or hung instead of answering.
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
        roomy: bool = False,
    ) -> None:
        self.values, self.looks = values, 0
        self._may_compute, self._roomy = may_compute, roomy
        self._workload, self._strategies = workload, strategies
        self._card, self._machine = emulated_card(gpu), new_machine()
        self._prober: Prober | None = None

    def __exit__(self, *raised: object) -> None:
        self._end()
        self._machine.remove()

    def resolve(self, plan: Plan, payloads: Mapping[str, Any] | None) -> ResolvedPlan:
        """Complete a plan with what the strategies find by running the model, with values."""
        before = self.values
        self._restart(values=True)
        resolved = resolve(plan, self.worker().survey().space(), self._strategies, payloads)
        self._restart(values=before)
        return resolved

    def look(
        self, resolved: ResolvedPlan, limit_bytes: int | None = None, *, recorded: bool = False
    ) -> Look:
        """Run the plan under a limit of the allocator; None: the GPU's memory."""
        self.looks += 1
        given = None if limit_bytes is None else limit_bytes + _SLACK_BYTES
        run = partial(look, resolved=resolved, limit_bytes=given, recorded=recorded)
        try:
            return self.worker().run(partial(run, values=self.values))
        except ValuesAsked:
            if not self._may_compute:
                raise
            self._restart(values=True)
            return self.worker().run(partial(run, values=True))

    def ample(self, resolved: ResolvedPlan) -> Look:
        """Run the plan in as much memory as it asks for, on a larger card where need be."""
        found = self.look(resolved, recorded=True)
        if found.failure is not None and not self._roomy:
            self._restart(roomy=True)
            found = self.look(resolved, recorded=True)
        return found

    def need(self, resolved: ResolvedPlan) -> Emulated:
        """Return what a plan needs.

        Raises:
            CannotTell: it does not run in `ROOM` times the GPU's memory.
        """
        ample = self.ample(resolved)
        if ample.failure is not None:
            raise CannotTell(
                f"{resolved.plan} does not run in {ROOM} times the memory of the GPU, the most "
                f"that is emulated: {ample.failure}"
            )
        return Emulated(ample, self._smallest_limit(resolved, ample), self.values)

    def high_bytes(self, resolved: ResolvedPlan, vram_budget_bytes: int) -> int:
        """Return about what a plan needs at most, and more than the budget if it does not fit.

        A look under the budget decides where replays say that it fits.
        """
        ample = self.ample(resolved)
        if ample.failure is not None:
            return sys.maxsize
        told = Emulated(ample, ample.replayed_bytes, self.values).interval[1]
        if told > vram_budget_bytes:
            return told
        least, _ = error_bounds(ample.estimates)
        limit = int((vram_budget_bytes - ample.non_torch_bytes) * (1 + least))
        pages = limit // PAGE_BYTES * PAGE_BYTES
        return told if self.look(resolved, pages).is_steady else vram_budget_bytes + 1

    def _smallest_limit(self, resolved: ResolvedPlan, ample: Look) -> int:
        """Return the smallest limit, in whole pages, under which looks are steady.

        Replays of what was recorded say where to begin; looks decide.
        """
        works = round_up(ample.peak_reserved_bytes, PAGE_BYTES)
        fails = ample.peak_allocated_bytes // PAGE_BYTES * PAGE_BYTES - PAGE_BYTES
        at = min(round_up(ample.replayed_bytes, PAGE_BYTES), works - PAGE_BYTES)
        stride = PAGE_BYTES
        while works - fails > PAGE_BYTES:
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
            channel.environment = emulated_environment(
                [card], machine=self._machine, values=self.values
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
