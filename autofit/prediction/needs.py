"""What plans of one workload need, from as few dry runs as possible, and the largest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from autofit.devices.gpu_catalogue import NCCL_BYTES, Gpu, answers_alike
from autofit.memory.allocator import ROUNDING_BYTES, expandable_segments, round_up
from autofit.memory.replay import Recording, peak_after, required_bytes
from autofit.plan import Dimension, ResolvedPlan
from autofit.prediction.dry_run import DryRun, dry_run, traced_sizes
from autofit.training.workload import Workload

# Margin around required bytes, as a fraction of them, where workspaces or kernels were not seen.
#
# That is so for convolutions and recurrent layers, and on GPUs on which no training was recorded:
# the workspaces of cuBLAS and the kernels of attention are known there from sources alone.
MARGIN = 0.05
# The same for all else on a GPU that trainings were recorded on.
#
# The largest error of the 16 trainings without cuDNN that an H200 recorded is 0.8%.
RECORDED_MARGIN = 0.02
# Largest margin for cuDNN workspaces of unknown size, as a fraction of required bytes.
WORKSPACE_MARGIN = 0.1


@dataclass(frozen=True)
class Need:
    """The memory that a plan needs on a GPU.

    Attributes:
        required_bytes: the smallest VRAM budget under which it runs, non-torch bytes included.
        margin_bytes: how far off that may be.
        unknown_bytes: the room that a fit leaves for what is not counted in either.
        evaluation_bytes: what an evaluation holds, non-torch bytes included; `required_bytes` is no
            less. None: the workload has none.
    """

    required_bytes: int
    margin_bytes: int
    unknown_bytes: int = 0
    evaluation_bytes: int | None = None

    @property
    def high_bytes(self) -> int:
        """What must be free for the plan to be said to fit, without what is unknown."""
        return self.required_bytes + self.margin_bytes


def need_of(
    recording: Recording, gpu: Gpu, ranks: int = 1, evaluation: Recording | None = None
) -> Need:
    """Return what a recorded dry run needs on its GPU, as one of this many ranks.

    Args:
        evaluation: the recording that an evaluation follows; None: the workload has none.
    """
    expandable = expandable_segments()
    required = required_bytes(recording, expandable_segments=expandable)
    evaluation_bytes = None
    if evaluation is not None:
        evaluation_bytes = peak_after(evaluation, expandable_segments=expandable)
        required = max(required, evaluation_bytes)
        evaluation_bytes += gpu.context_bytes
    unknown = NCCL_BYTES if ranks > 1 else 0
    margin = round(margin_bytes(recording, required, gpu)) + gpu.context_margin_bytes
    return Need(required + gpu.context_bytes, margin, unknown, evaluation_bytes)


def margin_bytes(recording: Recording, required: int, gpu: Gpu) -> float:
    """Return the margin around the required bytes of a dry run, without that of the context.

    It is a fraction of them plus the size of the largest workspace of a convolution (at most a
    tenth), since cuDNN's choice of algorithm is unknown.
    """
    share = RECORDED_MARGIN if gpu.recorded and not recording.uses_cudnn else MARGIN
    workspaces = (size for number, size in recording.events if number in recording.optional)
    largest = round_up(max(workspaces, default=0), ROUNDING_BYTES)
    return share * required + min(WORKSPACE_MARGIN * required, largest)


# A micro-batch in which PyTorch skips copies that others take.
_ALONE = 1


class SharedRuns:
    """Dry runs and needs of the plans of a workload, from as few dry runs as possible.

    A dry run serves each GPU that would have answered its questions alike. As long as a training
    makes the same allocations in the same order, their sizes lie on straight lines in the
    micro-batch: a part is fixed, and each sample adds as much. Where three dry runs of one variant
    lie on a line, two of them tell those of all micro-batches between. So ask for the largest GPU
    first.

    Args:
        workload: model, sample batch, loss and optimizer.

    Attributes:
        dry_runs: those that were made, in order.
        placements: by strategy and ranks, the dimensions of those that are the same on each GPU.
    """

    def __init__(self, workload: Workload) -> None:
        self.dry_runs: list[DryRun] = []
        self.placements: dict[Hashable, Mapping[str, Dimension]] = {}
        self._workload = workload
        self._runs: dict[Hashable, list[DryRun]] = {}
        self._straight: dict[Hashable, Sequence[int] | None] = {}
        self._needs: dict[Hashable, Need] = {}

    def run(self, resolved: ResolvedPlan, gpu: Gpu) -> DryRun:
        """Return the dry run of a plan on a GPU.

        Raises:
            PredictionUnavailable: the training needs values; the message names the line.
            Exception: raised by the user's own code.
        """
        plan = resolved.plan
        sizes = traced_sizes(plan, self._workload)
        is_even = len(set(sizes)) == 1
        group: Hashable = (plan.variant, plan.ranks, len(sizes) if is_even else sizes)
        runs = self._runs.setdefault(group, [])
        by_size = {run.micro_batch: run for run in runs if answers_alike(gpu, run.answers)}
        if sizes[0] in by_size:
            return by_size[sizes[0]]
        lined = is_even and sizes[0] != _ALONE and len(by_size.keys() - {_ALONE}) > 1
        straight = self._straight.get(group, ())
        if lined and straight and straight[0] <= sizes[0] <= straight[-1]:
            near = sorted(by_size.keys() - {_ALONE}, key=lambda at: abs(at - sizes[0]))
            if (interpolated := on_line(by_size[near[0]], by_size[near[1]], sizes[0])) is not None:
                runs.append(interpolated)
                return interpolated
        run = dry_run(self._workload, resolved, gpu)
        self.dry_runs.append(run)
        runs.append(run)
        if lined and straight is not None:
            ends = sorted(by_size.keys() - {_ALONE})
            holds = on_line(by_size[ends[0]], by_size[ends[-1]], sizes[0]) == run
            self._straight[group] = sorted((*ends, sizes[0], *straight)) if holds else None
        return run

    def need(self, resolved: ResolvedPlan, gpu: Gpu) -> Need:
        """Return what a plan needs on a GPU; raises as `run` does."""
        run = self.run(resolved, gpu)
        sizes = tuple(size.bytes_on(gpu) for size in run.gpu_sized.values())
        ranks = resolved.plan.ranks
        key = id(run), sizes, gpu.context_bytes, gpu.context_margin_bytes, gpu.recorded, ranks
        if key not in self._needs:
            self._needs[key] = need_of(run.recording_on(gpu), gpu, ranks, run.evaluation_on(gpu))
        return self._needs[key]


class _NotStraight(Exception):
    """Two dry runs differ in more than sizes, or no whole number lies between their sizes."""


def on_line(one: DryRun, other: DryRun, micro_batch: int) -> DryRun | None:
    """Return the dry run of another micro-batch, with each number on the line through two others.

    None where the two differ in more than numbers, or one is no fixed part and a whole number for
    each sample.
    """
    first, last = one.micro_batch, other.micro_batch

    def between(here: Any, there: Any) -> Any:
        if here == there:
            return here
        if type(here) is not type(there):
            raise _NotStraight
        if isinstance(here, int):
            size, rest = divmod((there - here) * (micro_batch - first), last - first)
            # No samples take less than nothing where sizes are squares, say.
            if rest or (here * last - there * first) * (last - first) < 0:
                raise _NotStraight
            return here + size
        if is_dataclass(here) and not isinstance(here, type):
            names = [each.name for each in fields(here) if each.compare]
            return replace(here, **{n: between(getattr(here, n), getattr(there, n)) for n in names})
        if isinstance(here, dict) and here.keys() == there.keys():
            return dict(zip(here, map(between, here.values(), there.values()), strict=True))
        if not isinstance(here, tuple) or len(here) != len(there):
            raise _NotStraight
        return tuple(map(between, here, there))

    try:
        return between(one, other)  # type: ignore[no-any-return]  # a dry run, of two
    except _NotStraight:
        return None


# Search for the largest micro-batch within a budget in few evaluations.

# No GPU has room for this many samples.
MAX_MICRO_BATCH = 2**36
# Largest number of evaluations.
MAX_LOOKS = 24
_STRIDE = 16
_FINE = 1000  # stop at three digits: 123,400 samples are as good as 123,457


def largest_that_fits(
    need: Callable[[int], int],
    budget: int,
    *,
    start: int,
    maximum: int = MAX_MICRO_BATCH,
) -> int | None:
    """Return the largest micro-batch that needs at most the budget, or one very near it.

    Memory grows almost linearly, in steps (the allocator's segments) that may be long. So the next
    micro-batch is where the line through the two nearest ones meets the budget. After two results
    in a row on the same side, it is the middle of the bounds (the geometric mean if they are far
    apart). After 24 evaluations the best one so far is returned.

    Args:
        need: micro-batch -> bytes; more than the budget where it cannot be trained.
        budget: bytes.
        start: the first micro-batch.
        maximum: the largest micro-batch to think of.

    Returns:
        A micro-batch that was evaluated; None if neither one sample nor two fit.
    """
    bytes_by_size = {start: need(start)}
    for smallest in (1, 2):  # BatchNorm may refuse one sample
        if (
            min(bytes_by_size.values()) > budget
            and smallest not in bytes_by_size
            and smallest < start
        ):
            bytes_by_size[smallest] = need(smallest)
    sides: list[bool] = []
    while len(bytes_by_size) < MAX_LOOKS:
        fits = max((at for at, needed in bytes_by_size.items() if needed <= budget), default=0)
        above = (at for at, needed in bytes_by_size.items() if needed > budget and at > fits)
        fails = min(above, default=maximum + 1)
        if fits == 0 or fails - fits <= max(1, fits // _FINE):
            break
        at = _crossing(bytes_by_size, budget)
        if fails > maximum and len(bytes_by_size) == 1 and maximum < MAX_MICRO_BATCH:
            at = maximum
        elif fails > maximum:
            at = min(max(at, 2 * fits), _STRIDE * fits)
        elif sides[-2:] in ([True, True], [False, False]):
            at = _middle(fits, fails)
        at = min(max(at, fits + 1), fails - 1)
        bytes_by_size[at] = need(at)
        sides.append(bytes_by_size[at] <= budget)
    return max((at for at, needed in bytes_by_size.items() if needed <= budget), default=None)


def _crossing(bytes_by_size: Mapping[int, int], budget: int) -> int:
    """Return the micro-batch where the line through the two points nearest the budget meets it."""
    if len(bytes_by_size) == 1:
        return 2 * next(iter(bytes_by_size))
    (one, here), (other, there) = sorted(
        bytes_by_size.items(), key=lambda look: abs(look[1] - budget)
    )[:2]
    if here == there:
        return _STRIDE * max(one, other)
    return int(one + (budget - here) * (other - one) / (there - here))


def _middle(fits: int, fails: int) -> int:
    return math.isqrt(fits * fails) if fails > 4 * fits else (fits + fails) // 2
