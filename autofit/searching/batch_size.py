"""`autofit.find_batch_size`: the micro-batch and accumulation of plain training, by a search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autofit.errors import (
    DeviceUnavailable,
    InvalidArgument,
    SearchTimedOut,
    WorkerFailed,
    hides_own_frames,
)
from autofit.measurement import probes_of
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.torchrun import ranks_meant
from autofit.report.record import INTERRUPTED
from autofit.report.report import Report
from autofit.searching.events import OnEvent
from autofit.searching.options import Allowance, SearchOptions
from autofit.searching.search import search
from autofit.space import UNBOUNDED_MICRO_BATCH
from autofit.training.workload import Workload, workload_of


@dataclass(frozen=True)
class BatchSize:
    """The fastest micro-batch that fits, with every setting at its default.

    Attributes:
        micro_batch: samples of a forward pass, as many in each one.
        accumulation_steps: micro-batches of an optimizer step; 1 where no global batch was given.
        global_batch: samples of an optimizer step: the product of those two.
        peak_bytes: most bytes that the training held, non-torch bytes included; None: unknown.
        samples_per_second: as its report shows them; None: nothing was timed.
        largest_micro_batch: the largest that was found to fit, which may not be the fastest: the
            next larger that was tried, a few percent above, did not, unless a warning says that the
            probes ended before. With a global batch the largest split that ran.
        is_decided: whether the split was told from that of the sample batch; where it was not,
            this is the latter.
        warnings: of the search, such as that split gradients differ from whole ones.
        report: of the search, with all that was tried.
    """

    micro_batch: int
    accumulation_steps: int
    global_batch: int
    peak_bytes: int | None
    samples_per_second: float | None
    largest_micro_batch: int
    is_decided: bool
    warnings: tuple[str, ...]
    report: Report


@hides_own_frames
def find_batch_size(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | Workload,
    sample_batch: Any = None,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    global_batch: int | None = None,
    vram_budget: str | float | None = None,
    device: str | Sequence[str] | None = None,
    max_probes: int | None = None,
    timeout: float | None = None,
    progress: OnEvent | bool | None = None,
    options: SearchOptions | None = None,
) -> BatchSize:
    """Find the micro-batch and accumulation that train fastest, and change nothing else.

    With a global batch, a search over its even splits alone, as plain PyTorch runs them. Where
    splitting changes the gradients, as with BatchNorm, the accumulation stays that of the sample
    batch; see `SearchOptions.allow_accumulation_change`. Without one the micro-batch is free, and
    with it the samples of an optimizer step: the fastest that fits is returned, and the largest,
    for which a few more are probed after the search. How large one may be on another GPU a dry run
    tells: `autofit.predict(...).largest_micro_batch`.

    Args:
        global_batch: samples per optimizer step, which are kept; None: free.
        max_probes: the most timed runs, of the search and of those after it.
        timeout: seconds, of both.
        options: a `SearchOptions`; its splits are even in any case. The others: as for `search`.

    Raises:
        InvalidArgument: an argument is invalid, or there are several ranks.
        Exception: as of `autofit.search`.
    """
    given = {"criterion": criterion, "loss_fn": loss_fn, "optimizer": optimizer}
    workload = workload_of(model, sample_batch, **given, global_batch=global_batch)
    began = time.monotonic()
    used = _with_even_split(SearchOptions() if options is None else options)
    report = search(
        workload,
        vram_budget=vram_budget,
        device=device,
        strategies=[],
        max_probes=max_probes,
        timeout=timeout,
        progress=progress,
        options=used,
    )
    chosen = report.record.recommended
    largest, ended = _largest(report, workload, used, Allowance(max_probes, timeout, began=began))
    return BatchSize(
        chosen.plan.micro_batch,
        chosen.plan.accumulation_steps,
        chosen.plan.samples_per_step,
        chosen.measurement.held_bytes,
        report.record.speed_of(chosen),
        largest,
        report.is_decided,
        (*report.warnings, *ended),
        report,
    )


CLOSE = 32
"""Sizes less than 1/32 larger are not worth a probe."""
STEP = 8
"""A line ends early where the caching allocator holds a segment that has room: so much is tried."""
_MAY_FIT = "A micro-batch larger than largest_micro_batch may fit: {}"
MAX_LARGER = 12
"""Probes for the largest size at most; a line through two sizes needs three or four."""


def _largest(
    report: Report, workload: Workload, options: SearchOptions, limits: Allowance
) -> tuple[int, list[str]]:
    """Return the largest micro-batch that ran, after probes of larger ones where it is free.

    And a warning where these ended before one of them failed.
    """
    record, trials = report.record, probes_of(report.trials)
    held = {t.plan.micro_batch: t.measurement.held_bytes or 0 for t in trials if t.ok}
    failed = {t.plan.micro_batch for t in trials if t.measurement.outcome.about_memory}
    probes, seconds = limits.probes_left(trials), limits.seconds_left
    is_over = record.search.stopped_because == INTERRUPTED or 0 in (probes, seconds)
    if workload.global_batch is not None:
        return max(held), []
    if is_over:
        return max(held), [_MAY_FIT.format("the search ended first")]
    ends_at = math.inf if seconds is None else time.monotonic() + seconds
    target = Target(record.environment["device"], record.vram_budget_bytes, record.search.seed)
    most = options.max_micro_batch or UNBOUNDED_MICRO_BATCH
    ended = ["there were no more probes"]
    try:
        with open_prober(
            workload, (), target, ends_at=ends_at, executor=options.executor
        ) as prober:
            for _ in range(MAX_LARGER if probes is None else min(MAX_LARGER, probes)):
                size = next_larger(held, failed, record.vram_budget_bytes, most)
                if size is None:
                    ended = []
                    break
                measured = prober.probe(ProbeRequest(ResolvedPlan(Plan(size)))).measurement
                if measured.ok:
                    held[size] = measured.held_bytes or 0
                elif measured.outcome.about_memory:
                    failed.add(size)
                else:  # the user's code takes no more, say
                    ended = [f"a micro-batch of {size} ended as {measured.outcome.value}"]
                    break
    except KeyboardInterrupt:  # the search has its answer, and ends with it
        ended = ["it was interrupted"]
    except (SearchTimedOut, WorkerFailed, DeviceUnavailable) as error:
        ended = [str(error)]
    return max(held), [_MAY_FIT.format(why) for why in ended]


def next_larger(
    held: Mapping[int, int], failed: Collection[int], budget_bytes: int, most: int
) -> int | None:
    """Return which larger micro-batch to try next; None: none that differs enough.

    The size at which a line through the bytes of the two largest meets the budget, or an eighth
    more than the largest; or the middle between the largest that fits and the next that does not.

    Args:
        held: bytes by micro-batch, of those that fit.
        failed: micro-batches that did not.
        budget_bytes: that may be held.
        most: the largest that is allowed.
    """
    low = max(held)
    below = max((size for size in held if held[size] < held[low]), default=0)
    rise = (held[low] - held.get(below, 0)) / (low - below)
    size = low + int((budget_bytes - held[low]) / rise) if rise else 2 * low
    size = max(size, low + low // STEP, low + 1)
    if (high := min((size for size in failed if size > low), default=size + 1)) <= size:
        size = (low + high) // 2
    size = min(size, most)
    return size if size - low > low // CLOSE else None


def _with_even_split(options: SearchOptions) -> SearchOptions:
    if not isinstance(options, SearchOptions):  # which the search refuses
        return options
    if (ranks := ranks_meant(options.ranks)) > 1:
        raise InvalidArgument(
            f"find_batch_size is for one process, not {ranks} ranks: use autofit.search"
        )
    return replace(options, even_split=True)
