"""One plan, stepped on a device: warm-up, timed steps, and what was measured of them.

Peaks cover warm-up and timed steps together, since the optimizer's state appears in the first step
and the peak often in the second.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from autofit.devices.base import Device, MemoryReading
from autofit.equivalence.comparison import first_change, versions
from autofit.errors import collect_garbage
from autofit.measurement import IN_EVALUATION, NEVER_UPDATED, Measurement, Outcome, RankUse
from autofit.plan import MICRO_BATCHES_OF_A_SEARCH, Plan
from autofit.probing.compiler_cache import CacheUse
from autofit.probing.faults import has_moved, spilled
from autofit.probing.requests import ProbeRequest
from autofit.training.batch import Batch, map_tensors
from autofit.training.builder import TrainingBuilder
from autofit.training.evaluation import evaluate, unchanged
from autofit.training.training import Training
from autofit.training.workload import Workload
from autofit.units import counted, format_bytes

WARM_UP_STEPS = 2
# float16 starts with a loss scale of 2**16 and halves it at each step that overflows.
MAX_WARM_UP_STEPS = 24
# Steps between two looks at the clock: looking synchronizes the device.
STEPS_PER_BLOCK = 3


def measure(builder: TrainingBuilder, request: ProbeRequest, vram_budget_bytes: int) -> Measurement:
    """Run a plan for a few optimizer steps.

    Args:
        builder: its device is limited to the budget already.
        request: the plan, the rate to beat and whether to accumulate in full.
        vram_budget_bytes: the peaks are compared with it.

    Raises:
        Exception: whatever the device or the user's code raises.
    """
    device, workload = builder.device, builder.fresh_workload()
    foreign_before = device.foreign_bytes()
    with ExitStack() as applied:
        steps = _warmed_up(applied, builder, workload, request)
        growth, retries_before = _timed(steps, request, vram_budget_bytes)
        peak, training = device.read(), steps.training
        evaluated = evaluation_peak(builder, workload, training, workload.eval_samples)
        notes = (*training.notes(), *_on_updates(steps))
    device.synchronize()  # a dead device is to show while this frame holds the pinned batch
    foreign = device.foreign_bytes()
    available = device.total_bytes - max(foreign or 0, foreign_before or 0)
    retries = peak.allocator_retries - retries_before
    headroom = vram_budget_bytes - peak.peak_held_bytes
    outcome, detail = (
        _failed_training(steps.loss, growth, headroom)
        or _lack_of_memory(peak, retries, vram_budget_bytes, available)
        or _lack_in_evaluation(evaluated, workload.eval_samples, vram_budget_bytes)
        or (Outcome.OK, growth.words(headroom) if growth and growth.collectable else None)
    )
    return Measurement(
        outcome,
        detail,
        step_times_s=steps.times_s,
        peak_allocated_bytes=peak.peak_allocated_bytes,
        peak_reserved_bytes=peak.peak_reserved_bytes,
        non_torch_bytes=peak.non_torch_bytes,
        resident_bytes=min(steps.update_bytes, default=None),
        gradient_bytes=min(steps.gradient_bytes, default=None),
        allocator_retries=retries,
        loss=steps.loss if math.isfinite(steps.loss) else None,
        losses=[loss for loss in steps.losses if math.isfinite(loss)],
        # A training_step may take all at once
        micro_batches_run=len(steps.counts) if training.has_split else 1,
        contended=has_moved(foreign_before, foreign, total_bytes=device.total_bytes),
        evaluation_peak_bytes=evaluated.peak_reserved_bytes if evaluated else None,
        start_up_s=start_up_s(steps.warm_up_s, steps.warm_up_steps, steps.as_run_s[-1]),
        start_is_warm=steps.start_is_warm,
        new_shape_s=steps.new_shape_s,
        notes=notes,
        ranks=[] if training.ranks is None else [_rank_use(steps, peak)],
    )


def _warmed_up(
    applied: ExitStack, builder: TrainingBuilder, workload: Workload, request: ProbeRequest
) -> _Steps:
    """Return the steps of a plan after their warm-up; `applied` ends their training."""
    plan, device = request.plan, builder.device
    places = micro_batches_to_run(workload, plan, full_accumulation=request.full_accumulation)
    short = micro_batches_to_run(workload, plan, full_accumulation=False)
    mix = _mix_on(builder, workload, plan, places)
    first = mix[-1][1] if short == places else samples_on(builder, workload, plan, short)
    with device.accounting():
        began, cache = perf_counter(), CacheUse()
        training = applied.enter_context(builder.training(workload, request.resolved))
        written = versions(training.plain_model)
        steps = _Steps(training, device, stands_for(plan, places), mix, written)
        steps.warm_up(first)
        steps.warm_up_s, steps.start_is_warm = perf_counter() - began, cache.is_warm()
        steps.warm_up_steps *= len(short) / len(places)
    return steps


def _timed(
    steps: _Steps, request: ProbeRequest, vram_budget_bytes: int
) -> tuple[Growth | None, int]:
    """Run the steps that are measured; return their growth and the allocator's retries before."""
    device = steps.device
    steps.meet_shorter()
    if device.tracked_steps:
        for _, shorter in steps.mix[:-1]:
            steps.run_tracked(shorter, 1)
    retries = device.read().allocator_retries
    steps.run_as_asked(request)
    growth = _growth(steps, vram_budget_bytes)
    if growth is None and steps.grew:  # these steps filled a cache: measure it as it is now
        retries = device.read().allocator_retries
        steps.run_as_asked(request)
    if device.tracked_steps:
        steps.time_as_asked(request)
    return growth, retries


def _on_updates(steps: _Steps) -> Iterator[str]:
    """Yield a note where no step changed a parameter.

    An update of 0, as at the start of a learning rate's warm-up, is one. Steps that wrote none are
    followed by a few whose parameters are compared, since `.data` is written unseen.
    """
    training = steps.training
    if training.ranks is not None or versions(training.plain_model) != steps.written:
        return

    def step() -> None:
        _step(training, steps.device, steps.mix[-1][1])

    if not first_change(training.plain_model, step, STEPS_PER_BLOCK):
        yield NEVER_UPDATED


def _rank_use(steps: _Steps, peak: MemoryReading) -> RankUse:
    """Return what this rank held, and how long its own steps took."""
    return RankUse(
        peak.peak_allocated_bytes,
        peak.peak_reserved_bytes,
        peak.non_torch_bytes,
        statistics.median(steps.own_times_s) if steps.own_times_s else None,
    )


def samples_on(
    builder: TrainingBuilder, workload: Workload, plan: Plan, places: Sequence[int]
) -> Batch:
    """Return what a step of those micro-batches of a plan's takes, in host memory."""
    sizes = plan.micro_batch_sizes_of(builder.world.rank)
    return staged(builder.device, workload.step_of(*(sizes[at] for at in places)))


def staged(device: Device, step: Any) -> Any:
    """Return the batches of a step in the host memory that a data loader should fill."""
    return map_tensors(device.stage, step)


def _mix_on(
    builder: TrainingBuilder, workload: Workload, plan: Plan, places: Sequence[int]
) -> list[tuple[float, Batch]]:
    """Return such steps of each length, with its share of all; the longest is the last."""
    sizes = plan.micro_batch_sizes_of(builder.world.rank)
    mix = workload.mix_of_steps([sizes[at] for at in places])
    return [(share, staged(builder.device, step)) for share, step in mix]


def evaluation_peak(
    builder: TrainingBuilder, workload: Workload, training: Training, samples: int | None
) -> MemoryReading | None:
    """Return the memory counters after an evaluation beside a training that has stepped.

    Their peaks are the evaluation's. The training's cache is released first, as the allocator does
    where memory is short.

    Args:
        builder: of the training, whose workload this is.
        samples: of the evaluation; None: there is none.

    Raises:
        Exception: as of `evaluate` and `unchanged` in `autofit.training.evaluation`.
    """
    if samples is None or workload.eval_step is None:
        return None
    device, batch = builder.device, workload.evaluation_batch(samples)
    with unchanged(training):
        collect_garbage()
        device.synchronize()
        device.release_cache(workspaces=False)  # cuBLAS keeps its own through a training
        device.reset_peaks()
        with device.accounting():
            evaluate(training, workload.eval_step, training.placed(batch), samples)
        device.synchronize()
        return device.read()


def _failed_training(
    loss: float, growth: Growth | None, headroom_bytes: int
) -> tuple[Outcome, str] | None:
    """Return how steps that all ran failed for their values or for a leak; None: they did not."""
    if not math.isfinite(loss):
        return Outcome.NONFINITE, f"the loss became {loss}"
    if growth is not None and growth.is_leak(headroom_bytes):
        return Outcome.LEAK, growth.words(headroom_bytes)
    return None


def _lack_of_memory(
    peak: MemoryReading, retries: int, vram_budget_bytes: int, available_bytes: int
) -> tuple[Outcome, str] | None:
    """Return how steps that all ran lacked memory; None: they did not."""
    held_bytes = peak.peak_held_bytes
    if held_bytes > vram_budget_bytes:
        return Outcome.OVER_BUDGET, _held_of(held_bytes, vram_budget_bytes)
    if retries > 0:
        flushed = f"the allocator flushed its cache {counted(retries, 'time')}"
        return Outcome.RETRIES, f"{flushed} in the timed steps"
    words_of_spill = spilled(held_bytes, available_bytes)
    return None if words_of_spill is None else (Outcome.OVER_BUDGET, words_of_spill)


def _lack_in_evaluation(
    peak: MemoryReading | None, samples: int | None, vram_budget_bytes: int
) -> tuple[Outcome, str] | None:
    """Return that an evaluation went over the budget; None: it did not, or there is none."""
    if peak is None or peak.peak_held_bytes <= vram_budget_bytes:
        return None
    held = _held_of(peak.peak_held_bytes, vram_budget_bytes)
    return Outcome.OVER_BUDGET, f"{IN_EVALUATION}{counted(samples or 0, 'sample')}: {held}"


def _held_of(held_bytes: int, vram_budget_bytes: int) -> str:
    return f"held {format_bytes(held_bytes)} of {format_bytes(vram_budget_bytes)} allowed"


@dataclass
class _Steps:
    """The steps of a probe so far.

    The warm-up runs the micro-batches of a probe of the search, whatever the timed steps run: they
    show every peak, and the optimizer's state.

    Attributes:
        training, device: what steps, and on what.
        counts: how many of its size in the plan each micro-batch of a timed step stands for.
        mix: a batch of each length with its share of the steps. A timed step is one of each, and
            its seconds are their mean.
        written: see `versions`, before the steps.
        times_s: seconds of each whole timed step; of several ranks, of the slowest in it.
        own_times_s: those of this process.
        as_run_s: of each length, the seconds with no more micro-batches than it ran.
        first_s: of each but the longest, those of its first step.
        end_bytes: allocated at the end of each step.
        update_bytes: allocated where updates began, once the optimizer has its state.
        gradient_bytes: what these updates freed.
        losses: one of each block of steps.
        loss: the last one.
        warm_up_steps: of the warm-up, as many whole steps as its micro-batches make.
        warm_up_s: seconds of the warm-up, and of making the training.
        start_is_warm: as of a `Measurement`.
        grew: whether memory grew with each step, if only for a while.
    """

    training: Training
    device: Device
    counts: Sequence[float]
    mix: Sequence[tuple[float, Batch]]
    written: Sequence[int]
    times_s: list[float] = field(default_factory=list)
    own_times_s: list[float] = field(default_factory=list)
    as_run_s: list[list[float]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    end_bytes: list[int] = field(default_factory=list)
    update_bytes: list[int] = field(default_factory=list)
    gradient_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    loss: float = math.nan
    warm_up_steps: float = 0.0
    warm_up_s: float = 0.0
    start_is_warm: bool | None = None
    grew: bool = False

    def warm_up(self, batch: Batch) -> None:
        """Step until two steps have updated."""
        for _ in warm_up(self.training):
            self._run_one(batch)
        self.warm_up_steps = len(self.end_bytes)
        del self.end_bytes[:-WARM_UP_STEPS]
        del self.update_bytes[: 1 - WARM_UP_STEPS], self.gradient_bytes[: 1 - WARM_UP_STEPS]

    def meet_shorter(self) -> None:
        """Time the first step of each length but the longest: its shapes are new."""
        for _, batch in self.mix[:-1]:
            _, marks = _step(self.training, self.device, batch)
            self.device.synchronize()
            self.first_s.append(self.device.seconds_between(marks[0], marks[-1]))
        self.as_run_s = [[] for _ in self.mix]

    @property
    def new_shape_s(self) -> list[float]:
        """What these took beyond the median later step of the same length."""
        later = zip(self.first_s, self.as_run_s, strict=False)
        return [max(0.0, first - statistics.median(run)) for first, run in later if run]

    def run_as_asked(self, request: ProbeRequest) -> None:
        """Run the steps that show memory: on a device that tracks some, others than are timed.

        A long training is tracked all along, and shows what is late.
        """
        if self.device.tracked_steps:
            self.run_tracked(self.mix[-1][1], max(self.device.tracked_steps, request.steps or 0))
        else:
            self.time_as_asked(request)

    def time_as_asked(self, request: ProbeRequest) -> None:
        """Time as many steps as are asked for, or as are enough, and forget earlier ones."""
        for times_s in (self.times_s, self.own_times_s, *self.as_run_s):
            times_s.clear()
        while not enough_steps(self.times_s, request) and math.isfinite(self.loss):
            left = STEPS_PER_BLOCK if request.steps is None else request.steps - len(self.times_s)
            self.time(min(STEPS_PER_BLOCK, left))

    def run_tracked(self, batch: Batch, count: int) -> None:
        """Run steps that the device accounts for and nobody times."""
        with self.device.accounting():
            for _ in range(count):
                self._run_one(batch)

    def run_all_lengths(self, count: int) -> None:
        """Run so many steps of each length, of which nothing is kept."""
        with self.device.accounting():
            for _ in range(count):
                for _, batch in self.mix:
                    _step(self.training, self.device, batch)

    def collected_bytes(self) -> int:
        """Return what is allocated after a garbage collection."""
        collect_garbage()
        return self.device.allocated_bytes()

    def largest(self, *numbers: float) -> list[float]:
        """Return the largest of each number over the ranks, which then decide alike."""
        ranks = self.training.ranks
        return list(numbers) if ranks is None else ranks.largest(numbers)

    def _run_one(self, batch: Batch) -> None:
        self.loss = float(_step(self.training, self.device, batch, self.update_bytes)[0])
        self.end_bytes.append(self.device.allocated_bytes())
        if self.update_bytes:
            freed = self.update_bytes[-1] - self.end_bytes[-1]
            self.gradient_bytes.append(max(freed, 0))

    def time(self, count: int) -> None:
        """Time so many steps, of each length one, between two looks at the clock."""
        block = []
        for _ in range(count):
            ran = [_step(self.training, self.device, batch) for _, batch in self.mix]
            loss, _ = ran[-1]
            block.append([marks for _, marks in ran])
            if not self.device.tracked_steps:
                self.end_bytes.append(self.device.allocated_bytes())
        self.device.synchronize()
        self.loss = float(loss)
        self.losses.append(self.loss)
        times_s = [self._mean_seconds(each) for each in block]
        self.own_times_s += times_s
        for length, ran_s in enumerate(self.as_run_s):
            ran_s += [
                self.device.seconds_between(each[length][0], each[length][-1]) for each in block
            ]
        self.times_s += self.largest(*times_s)  # by which all decide alike whether to go on

    def _mean_seconds(self, of_lengths: Sequence[Sequence[Any]]) -> float:
        """Return the mean over the lengths, by their shares, from the marks of a step of each."""
        seconds = [_seconds(self.device, marks, self.counts) for marks in of_lengths]
        return sum(share * s for (share, _), s in zip(self.mix, seconds, strict=True))


def start_up_s(
    warm_up_s: float, warm_up_steps: float, step_times_s: Sequence[float]
) -> float | None:
    """Return the seconds of a warm-up beyond those of its steps; None: no step was timed.

    Args:
        warm_up_s: of the warm-up.
        warm_up_steps: as many timed steps as its micro-batches make.
        step_times_s: of timed steps, as they ran.
    """
    if not step_times_s:
        return None
    return max(0.0, warm_up_s - warm_up_steps * statistics.median(step_times_s))


def micro_batches_to_run(
    workload: Workload, plan: Plan, *, full_accumulation: bool
) -> tuple[int, ...]:
    """Return the places of the micro-batches that a probe runs of a plan's optimizer step.

    The first two, and the last if it is smaller than these. The places are those of the first rank
    on every rank, since all run as many.
    """
    sizes = plan.micro_batch_sizes
    if full_accumulation or workload.training_step is not None:
        return tuple(range(len(sizes)))
    first = tuple(range(len(sizes)))[:MICRO_BATCHES_OF_A_SEARCH]
    return first if sizes[-1] == sizes[first[-1]] else (*first, len(sizes) - 1)


def stands_for(plan: Plan, places: Sequence[int]) -> list[float]:
    """Return, of each micro-batch that runs, how many of its size in the plan it stands for."""
    sizes = plan.micro_batch_sizes
    in_plan, run = Counter(sizes), Counter(sizes[place] for place in places)
    return [in_plan[sizes[place]] / run[sizes[place]] for place in places]


def warm_up(training: Training) -> Iterator[None]:
    """Yield for each step until two have updated: one that overflows makes no optimizer state."""
    updates = 0
    for _ in range(MAX_WARM_UP_STEPS):
        scale_before = _scale(training)
        yield
        updates += _scale(training) >= scale_before
        if updates == WARM_UP_STEPS:
            return


def _scale(training: Training) -> float:
    return 1.0 if training.scaler is None else float(training.scaler.get_scale())


def _step(
    training: Training, device: Device, batch: Batch, update_bytes: list[int] | None = None
) -> tuple[torch.Tensor, list[Any]]:
    """Run one optimizer step; return its loss and marks between which its parts lie.

    The parts are the micro-batches, and the update at the end. With a training_step, nobody knows
    where its update begins, and the whole step is one part.

    Args:
        update_bytes: takes the bytes that are allocated where the update begins.
    """
    marks = [device.mark()]
    if training.recipe.training_step is not None:
        loss = training.step(batch)
        return loss, [*marks, device.mark()]
    undo = training.before_micro_batch(lambda is_last: marks.append(device.mark()))
    training.zero_grad()
    loss = training.accumulate(batch, then_updates=True)
    undo()
    del marks[1]  # what precedes the first micro-batch belongs to it
    marks.append(device.mark())
    if update_bytes is not None:
        update_bytes.append(device.allocated_bytes())
    training.optimizer_step()
    return loss, [*marks, device.mark()]


def _seconds(device: Device, marks: Sequence[Any], counts: Sequence[float]) -> float:
    """Return the seconds of a step in which each micro-batch runs as often as in the plan.

    Where one was left out, having no weight in the loss, the others stand for it alike.
    """
    parts = [device.seconds_between(*pair) for pair in pairwise(marks)]
    if len(parts) == 1:
        return parts[0]
    *micro_batches, update = parts
    if len(micro_batches) != len(counts):
        counts = [sum(counts) / len(counts)] * len(micro_batches)
    return update + sum(s * count for s, count in zip(micro_batches, counts, strict=True))


# How many optimizer steps are timed: the one rule, for real and simulated devices alike.

MIN_TIMED_STEPS = 3
MAX_TIMED_STEPS = 30
# The fewest whose range holds their median with 95%: 1 - 2 * 0.5**6 = 97%, of 3 steps 75%.
SURE_TIMED_STEPS = 6
# Until so many seconds were timed, other processes may have hit every step: their slices take some
# milliseconds.
SHORT_S = 0.1
# Half the width of the interval, as a share of the median, where an answer is compared.
CLOSE_ENOUGH = 0.01
# The same for a plan that has an incumbent to beat: unless the search is cut short, it is measured
# again before it is the answer. On two cores three of four searches took a fifth to a third less
# time than with 1%, for plans as fast (measured on 2026-11-28).
CLOSE_ENOUGH_TO_SEARCH = 0.03


def enough_steps(step_times_s: Sequence[float], request: ProbeRequest) -> bool:
    """Return whether enough steps were timed.

    Without an incumbent, the interval of the median step time (`median_interval`) has to lie within
    1% of the median on either side; with one, within 3%, or wholly above the incumbent's step
    time. Steps number at least 3, or 6 where they take less than 0.1 s, and at most 30; they end
    with the request's seconds.

    Args:
        step_times_s: seconds of each whole optimizer step so far.
        request: the plan, the rate to beat, and a number of steps that overrules all else.
    """
    count = len(step_times_s)
    if request.steps is not None:
        return count >= request.steps
    may_all_be_hit = count < SURE_TIMED_STEPS and sum(step_times_s) < SHORT_S
    if count < MIN_TIMED_STEPS or may_all_be_hit:
        return False
    if count >= MAX_TIMED_STEPS or sum(step_times_s) >= request.most_timed_seconds:
        return True
    seen = Measurement(Outcome.OK, step_times_s=step_times_s)
    interval, middle = seen.step_time_interval_s, seen.step_time_s
    assert interval is not None  # there are step times
    assert middle is not None
    fastest, slowest = interval
    half_width = (slowest - fastest) / (2 * middle)
    if request.incumbent_samples_per_second is None:
        return half_width <= CLOSE_ENOUGH
    time_to_beat = request.plan.samples_per_step / request.incumbent_samples_per_second
    return half_width <= CLOSE_ENOUGH_TO_SEARCH or fastest > time_to_beat


# Growth: a leak, or a reference cycle that waits for the garbage collector.
#
# In a healthy loop the bytes allocated at the end of an optimizer step are the same after every
# step, to the byte (measured on an H200 and in the simulated allocator), so growth needs no
# statistics.

LEAK_WINDOW_STEPS = 8
MIN_ENDS = 3
# Growth may end: torch has 32 streams a device, and caches and queues of metrics often hold 64 or
# 100. It is watched for so many more steps, or seconds, and for as long as half of what is left of
# the budget lasts.
MAX_STEPS_OF_GROWTH = 128
MAX_SECONDS_OF_GROWTH = 30.0
# Growth that would not reach the budget within so many steps (a kept number) is not a leak.
HORIZON_STEPS = 1_000_000


@dataclass(frozen=True)
class Growth:
    """Memory that a training adds to what it holds.

    Attributes:
        bytes_per_step: median growth from one step's end to the next.
        collectable: the garbage collector takes it back.
        steps: in how many it was seen.
    """

    bytes_per_step: int
    collectable: bool
    steps: int = 0

    def steps_until(self, headroom_bytes: int) -> int:
        """Return the steps until the growth has used up that much."""
        return max(headroom_bytes, 0) // self.bytes_per_step

    def is_leak(self, headroom_bytes: int) -> bool:
        """Return whether a training of ordinary length would outgrow the budget."""
        return not self.collectable and self.steps_until(headroom_bytes) < HORIZON_STEPS

    def words(self, headroom_bytes: int) -> str:
        """Return a sentence about it, with its size and the way out."""
        much = format_bytes(self.bytes_per_step)
        if self.collectable:
            return f"a reference cycle keeps {much} of every step until garbage collection"
        return (
            f"memory grows by {much} in every step, and had not stopped after {self.steps} of "
            f"them: the budget is reached in about {self.steps_until(headroom_bytes)} steps. "
            "Something keeps tensors, often a list of losses with their graphs: keep loss.item() "
            "or loss.detach(). If it is a cache that fills up, bound it lower, or fill it before"
        )


def bytes_per_step(end_bytes: Sequence[int]) -> int | None:
    """Return the median growth per step; None if any of the last steps did not add memory.

    Args:
        end_bytes: allocated bytes at the end of each step; None is returned for fewer than three.
    """
    recent = end_bytes[-LEAK_WINDOW_STEPS - 1 :]
    if len(recent) < MIN_ENDS:
        return None
    added = [after - before for before, after in pairwise(recent)]
    return int(statistics.median(added)) if min(added) > 0 else None


def growth_over(end_bytes: Sequence[int], collected_bytes: int) -> Growth | None:
    """Return the growth over these steps; None where there is none.

    Args:
        end_bytes: allocated bytes at the end of each step.
        collected_bytes: allocated bytes after a garbage collection that followed the last of them.
    """
    per_step = bytes_per_step(end_bytes)
    if per_step is None:
        return None
    grown = end_bytes[-1] - end_bytes[0]
    collectable = end_bytes[-1] - collected_bytes > grown // 2
    return Growth(per_step, collectable, len(end_bytes) - 1)


def _growth(steps: _Steps, vram_budget_bytes: int) -> Growth | None:
    """Return what every step added and does not end; more steps are run to find that out."""
    device = steps.device
    # The device accounted alike for these
    end_bytes = steps.end_bytes[0 if device.tracked_steps else WARM_UP_STEPS :]
    found = None
    if bytes_per_step(end_bytes) is not None:
        found = growth_over(end_bytes, steps.collected_bytes())
    (keeps,) = steps.largest(found is not None and not found.collectable)
    if not keeps:
        return found
    steps.grew = True
    return _unending(steps, found or Growth(1, False, len(end_bytes) - 1), vram_budget_bytes)


def _unending(steps: _Steps, growth: Growth, vram_budget_bytes: int) -> Growth | None:
    """Watch growth for some steps more; return it as it is then, or None once it has ended.

    Args:
        steps: of the training.
        growth: as it was seen; of a rank that has none, a byte a step.
        vram_budget_bytes: no more than half of what is left of it is filled.
    """
    began, seen = perf_counter(), growth.steps
    held, grown = steps.collected_bytes(), 1
    while grown > 0:
        room = vram_budget_bytes - steps.device.read().peak_held_bytes
        is_over = (
            growth.steps - seen >= MAX_STEPS_OF_GROWTH
            or perf_counter() - began > MAX_SECONDS_OF_GROWTH
            or growth.steps_until(room) < 2 * LEAK_WINDOW_STEPS
        )
        if any(steps.largest(is_over)):
            return growth
        steps.run_all_lengths(LEAK_WINDOW_STEPS)
        held, before = steps.collected_bytes(), held
        per_step = max(1, (held - before) // LEAK_WINDOW_STEPS)
        growth = Growth(per_step, False, growth.steps + LEAK_WINDOW_STEPS)
        grown = int(steps.largest(held - before)[0])
    return None
