"""What plans of one workload need, from as few dry runs as possible, and the largest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from autofit.devices.gpus import Gpu, answers_alike
from autofit.errors import PredictionUnavailable
from autofit.memory.blocks import ROUNDING_BYTES, round_up
from autofit.memory.expandable import expandable_segments
from autofit.memory.replay import Recording, required_bytes
from autofit.plan import ResolvedPlan
from autofit.prediction.dry_run import dry_run, traced_sizes
from autofit.prediction.trace import Trace, on_line
from autofit.training.workload import Workload
from autofit.units import GIB

MARGIN = 0.05
"""Margin around required bytes, as a fraction of them, where workspaces or kernels were not seen.

That is so for convolutions and recurrent layers, and on GPUs on which no training was recorded: the
workspaces of cuBLAS and the kernels of attention are known there from sources alone."""
RECORDED_MARGIN = 0.02
"""The same for all else on a GPU that trainings were recorded on.

The largest error of the 16 trainings without cuDNN that an H200 recorded is 0.8 %."""
NCCL_BYTES = 2 * GIB
"""Room to leave for what NCCL holds on each of several ranks, which is not known."""
WORKSPACE_MARGIN = 0.1
"""Largest margin for cuDNN workspaces of unknown size, as a fraction of required bytes."""


@dataclass(frozen=True)
class Need:
    """The memory that a plan needs on a GPU.

    Attributes:
        required_bytes: the smallest VRAM budget under which it runs, non-torch bytes included.
        margin_bytes: how far off that may be.
        unknown_bytes: the room that a fit leaves for what is not counted in either.
    """

    required_bytes: int
    margin_bytes: int
    unknown_bytes: int = 0

    @property
    def high_bytes(self) -> int:
        """What must be free for the plan to be said to fit, without what is unknown."""
        return self.required_bytes + self.margin_bytes

    def fits(self, vram_budget_bytes: int) -> bool | None:
        """Return whether the plan fits into a budget; None: what is unknown decides."""
        return told(self.high_bytes, self.unknown_bytes, vram_budget_bytes)


def told(high_bytes: int, unknown_bytes: int, vram_budget_bytes: int) -> bool | None:
    """Return whether a plan fits; None: what is unknown decides."""
    if high_bytes > vram_budget_bytes:
        return False
    return True if high_bytes + unknown_bytes <= vram_budget_bytes else None


def need_of(recording: Recording, gpu: Gpu, world_size: int = 1) -> Need:
    """Return what a recorded dry run needs on its GPU, as one of so many ranks."""
    required = required_bytes(recording, expandable_segments=expandable_segments())
    unknown = NCCL_BYTES if world_size > 1 else 0
    margin = round(margin_bytes(recording, required, gpu)) + gpu.context_margin_bytes
    return Need(required + gpu.context_bytes, margin, unknown)


def margin_bytes(recording: Recording, required: int, gpu: Gpu) -> float:
    """Return the margin around the required bytes of a dry run, without that of the context.

    It is a fraction of them plus the size of the largest workspace of a convolution (at most a
    tenth), since cuDNN's choice of algorithm is unknown.
    """
    share = RECORDED_MARGIN if gpu.recorded and not recording.uses_cudnn else MARGIN
    workspaces = (size for number, size in recording.events if number in recording.optional)
    largest = round_up(max(workspaces, default=0), ROUNDING_BYTES)
    return share * required + min(WORKSPACE_MARGIN * required, largest)


_ALONE = 1
"""A micro-batch in which PyTorch skips copies that others take."""
_Run: TypeAlias = tuple[Trace, Mapping[str, object]]
"""A trace, and what the GPU in whose place it ran was asked and answered."""


class SharedRuns:
    """Traces and needs of the plans of a workload, from as few dry runs as possible.

    A dry run serves each GPU that would have answered its questions alike. Where three dry runs of
    one variant lie on a line (`autofit.prediction.trace`), two of them tell the traces of all
    micro-batches between. So ask for the largest GPU first.

    Args:
        workload: model, sample batch, loss and optimizer.

    Attributes:
        dry_runs: how many were made.
        has_stand_in_loss: whether in one of them the model's outputs stood in for a loss.
        parameters: elements of the model's parameters; None: of several ranks, or no run yet.
    """

    def __init__(self, workload: Workload) -> None:
        self.dry_runs = 0
        self.has_stand_in_loss = False
        self.parameters: int | None = None
        self._workload = workload
        self._runs: dict[Hashable, list[_Run]] = {}
        self._failures: dict[Hashable, PredictionUnavailable] = {}
        self._lines: dict[Hashable, Trace | None] = {}
        self._straight: dict[Hashable, range] = {}
        self._bent: set[Hashable] = set()
        self._needs: dict[Hashable, tuple[Trace, Need]] = {}

    def trace(self, resolved: ResolvedPlan, gpu: Gpu) -> Trace:
        """Return the trace of a plan on a GPU.

        Raises:
            PredictionUnavailable: the training needs values; the message names the line.
            Exception: raised by the user's own code.
        """
        plan = resolved.plan
        sizes = traced_sizes(plan, self._workload)
        is_even = len(set(sizes)) == 1
        alike: Hashable = (plan.variant, plan.world_size, len(sizes) if is_even else sizes)
        runs = self._runs.setdefault(alike, [])
        known = {trace.micro_batch: trace for trace, answers in runs if answers_alike(gpu, answers)}
        if sizes[0] in known:
            return known[sizes[0]]
        if is_even and alike not in self._bent:
            found = self._on_line(alike, known, sizes[0])
            if found is not None:
                return found
        if (failure := self._failures.get((alike, sizes[0]))) is not None:
            raise failure
        try:
            run = dry_run(self._workload, resolved, gpu)
        except PredictionUnavailable as error:
            self._failures[alike, sizes[0]] = error
            raise
        self.dry_runs += 1
        self.has_stand_in_loss |= run.has_stand_in_loss
        self.parameters = run.parameters
        runs.append((run.trace, run.answers))
        if is_even:
            self._compare(alike, known, run.trace)
        return run.trace

    def need(self, resolved: ResolvedPlan, gpu: Gpu) -> Need:
        """Return what a plan needs on a GPU; raises as `trace` does."""
        trace = self.trace(resolved, gpu)
        sizes = tuple(size.bytes_on(gpu) for size in trace.by_card.values())
        ranks = resolved.plan.world_size
        key = id(trace), sizes, gpu.context_bytes, gpu.context_margin_bytes, gpu.recorded, ranks
        if key not in self._needs:
            self._needs[key] = trace, need_of(trace.recording_on(gpu), gpu, ranks)
        return self._needs[key][1]

    def _on_line(
        self, alike: Hashable, known: Mapping[int, Trace], micro_batch: int
    ) -> Trace | None:
        """Return the trace on the line of the two known ones nearest, where lines hold."""
        near = sorted(known.keys() - {_ALONE}, key=lambda at: abs(at - micro_batch))[:2]
        if len(near) < 2 or micro_batch not in self._straight.get(alike, ()):
            return None
        one, other = (known[at] for at in near)
        key = id(one), id(other), micro_batch
        if key not in self._lines:
            self._lines[key] = on_line(one, other, micro_batch)
        return self._lines[key]

    def _compare(self, alike: Hashable, known: Mapping[int, Trace], made: Trace) -> None:
        """Note where lines hold, or that they do not, by a trace beside two that are known."""
        others = sorted(known.keys() - {_ALONE})
        if len(others) < 2 or made.micro_batch == _ALONE:
            return
        if on_line(known[others[0]], known[others[-1]], made.micro_batch) != made:
            self._bent.add(alike)
            return
        straight = self._straight.get(alike, range(0))
        held = [straight.start, straight.stop - 1] if straight else []
        ends = [others[0], others[-1], made.micro_batch, *held]
        self._straight[alike] = range(min(ends), max(ends) + 1)


# Search for the largest micro-batch within a budget in few evaluations.

MOST = 2**36
"""No GPU has room for this many samples."""
MOST_LOOKS = 24
"""Largest number of evaluations."""
_STRIDE = 16
_FINE = 1000  # stop at three digits: 123,400 samples are as good as 123,457


def largest_that_fits(
    need: Callable[[int], int],
    budget: int,
    *,
    start: int,
    known: Mapping[int, int] = MappingProxyType({}),
    most: int = MOST,
) -> int | None:
    """Return the largest micro-batch that needs at most the budget, or one very near it.

    Memory grows almost linearly, in steps (the allocator's segments) that may be long. So the next
    micro-batch is where the line through the two nearest ones meets the budget. After two results
    in a row on the same side, it is the middle of the bounds (the geometric mean if they are far
    apart). After 24 evaluations the best one so far is returned.

    Args:
        need: micro-batch -> bytes.
        budget: bytes.
        start: the first micro-batch.
        known: micro-batch -> bytes, of further ones.
        most: the largest micro-batch to think of.

    Returns:
        A micro-batch that was evaluated or is known; None if one sample does not fit.
    """
    looked = {**known, start: need(start)}
    if min(looked.values()) > budget and 1 not in looked:
        looked[1] = need(1)
    sides: list[bool] = []
    while len(looked) < MOST_LOOKS:
        fits = max((at for at, needed in looked.items() if needed <= budget), default=0)
        fails = min((at for at, needed in looked.items() if needed > budget), default=most + 1)
        if fits == 0 or fails - fits <= max(1, fits // _FINE):
            break
        at = _crossing(looked, budget)
        if fails > most and len(looked) == 1 and most < MOST:
            at = most
        elif fails > most:
            at = min(max(at, 2 * fits), _STRIDE * fits)
        elif sides[-2:] in ([True, True], [False, False]):
            at = _middle(fits, fails)
        at = min(max(at, fits + 1), fails - 1)
        looked[at] = need(at)
        sides.append(looked[at] <= budget)
    return max((at for at, needed in looked.items() if needed <= budget), default=None)


def guess_from(looked: Mapping[int, int], budget: int) -> int:
    """Return about the largest micro-batch that fits, from what some need on another GPU."""
    fits = max((at for at, needed in looked.items() if needed <= budget), default=None)
    fails = min((at for at, needed in looked.items() if needed > budget), default=None)
    if fits is not None and fails is not None:
        looked = {at: looked[at] for at in (fits, fails)}
    return _crossing(looked, budget)


def _crossing(looked: Mapping[int, int], budget: int) -> int:
    """Return the micro-batch where the line through the two points nearest the budget meets it."""
    if len(looked) == 1:
        return 2 * next(iter(looked))
    (one, here), (other, there) = sorted(looked.items(), key=lambda look: abs(look[1] - budget))[:2]
    if here == there:
        return _STRIDE * max(one, other)
    return int(one + (budget - here) * (other - one) / (there - here))


def _middle(fits: int, fails: int) -> int:
    return math.isqrt(fits * fails) if fails > 4 * fits else (fits + fails) // 2
