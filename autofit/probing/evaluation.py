"""The largest evaluation batch beside a plan: by a line through two that ran, and confirmed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from autofit.devices.base import MemoryReading
from autofit.errors import release_exception
from autofit.plan import ResolvedPlan
from autofit.probing.measure import evaluation_peak, micro_batches_to_run, samples_on, warm_up
from autofit.probing.requests import Workplace

# Of the budget: the allocator rounds to segments of 2 MiB and more, so a line is a little off.
AIMED = 0.97
# A batch is at most this many times as large as the largest that ran, as in a search.
MAX_TIMES = 4
# And at most this many times as large as the user's: no evaluation needs more to be fast.
MAX_IN_ALL = 64
# A batch that is larger by less is not run.
MIN_TIMES = 1.05
# Batches that ran out of memory; the worker lives on, but each takes as long as one that fits.
MAX_FAILED = 2
# Then the largest that ran is the answer.
MAX_SECONDS = 20.0


@dataclass(frozen=True)
class LargestEvaluation:
    """What evaluations beside a plan hold, non-torch bytes included.

    Attributes:
        samples, held_bytes: of the user's own batch.
        largest_samples, largest_held_bytes: of the largest batch that ran within the budget.
        is_bound: whether the budget bounds it; else larger ones were not tried.
    """

    samples: int
    held_bytes: int
    largest_samples: int
    largest_held_bytes: int
    is_bound: bool


def largest_evaluation(
    session: Workplace, *, resolved: ResolvedPlan, vram_budget_bytes: int
) -> LargestEvaluation:
    """Run a plan until it has all its state, and then evaluations of more and more samples.

    Args:
        session: limited to the budget; its workload has an evaluation.
        resolved: a plan beside which the user's own evaluation ran.
        vram_budget_bytes: for training, evaluation and non-torch bytes together.

    Raises:
        Exception: what the user's code or the device raised, but for a lack of memory.
    """
    builder, plan = session.builder, resolved.plan
    device, workload = builder.device, builder.fresh_workload()
    own = workload.eval_samples
    assert own is not None  # a search without an evaluation does not ask
    places = micro_batches_to_run(workload, plan, full_accumulation=False)
    batch = samples_on(builder, workload, plan, places)
    with ExitStack() as applied:
        with device.accounting():
            training = applied.enter_context(builder.training(workload, resolved))
            for _ in warm_up(training):
                training.step(batch)

        def run(samples: int) -> MemoryReading | None:
            try:
                return evaluation_peak(builder, workload, training, samples)
            except torch.OutOfMemoryError as error:
                if samples <= own:
                    raise
                release_exception(error)
                return None

        found, is_bound = climb(run, own, vram_budget_bytes)
    builder.reclaim_or_not()
    largest = max(found)
    held, most = found[own].peak_held_bytes, found[largest].peak_held_bytes
    return LargestEvaluation(own, held, largest, most, is_bound)


def climb(
    run: Callable[[int], MemoryReading | None], own: int, vram_budget_bytes: int
) -> tuple[dict[int, MemoryReading], bool]:
    """Return what batches took up to the largest that fits, and whether the budget bounds that.

    Args:
        run: samples -> the memory that they took; None: it ran out.
        own: samples that are known to fit.
        vram_budget_bytes: the most that a batch may hold.
    """
    ends_at, most = time.monotonic() + MAX_SECONDS, MAX_IN_ALL * own
    found: dict[int, MemoryReading] = {}
    failed: list[int] = []
    at = max(own // 2, 1)
    while True:
        seen = run(at)
        if at > own and (seen is None or seen.peak_held_bytes > vram_budget_bytes):
            failed.append(at)
        elif seen is not None:
            found[at] = seen
        largest = max(found)
        if failed:
            at = (largest + failed[-1]) // 2
        else:
            at = own if largest < own else min(_aimed_at(found, vram_budget_bytes), most)
        if at < MIN_TIMES * largest or len(failed) == MAX_FAILED:
            return found, largest < most
        if largest >= own and time.monotonic() > ends_at:
            return found, False


def _aimed_at(found: Mapping[int, MemoryReading], vram_budget_bytes: int) -> int:
    """Return the samples where the line through the two largest meets the target share.

    Allocated bytes lie on a line; what is held for them keeps its ratio to these.
    """
    *before, (largest, seen) = sorted(found.items())
    farthest = MAX_TIMES * largest
    if not before:
        return 2 * largest
    fewer, less = before[-1]
    allocated = seen.peak_allocated_bytes
    each = (allocated - less.peak_allocated_bytes) / (largest - fewer)
    if each <= 0:
        return farthest
    room = AIMED * vram_budget_bytes * allocated / seen.peak_held_bytes - allocated
    return min(farthest, largest + int(room / each))
