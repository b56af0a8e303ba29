"""`autofit.find_batch_size`: the micro-batch and accumulation of plain training, by a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autofit.errors import InvalidArgument, hides_own_frames
from autofit.probing.torchrun import ranks_meant
from autofit.report.report import Report
from autofit.searching.events import OnEvent
from autofit.searching.options import SearchOptions
from autofit.searching.search import search
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
        largest_micro_batch: the largest that ran within the budget, which may not be the fastest.
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
    with it the samples of an optimizer step. The fastest that fits is returned, and beside it the
    largest that ran: how large one may be on a GPU a dry run tells, too,
    `autofit.predict(...).largest_micro_batch`.

    Args:
        global_batch: samples per optimizer step, which are kept; None: free.
        options: a `SearchOptions`; its splits are even in any case. The others: as for `search`.

    Raises:
        InvalidArgument: an argument is invalid, or there are several ranks.
        Exception: as of `autofit.search`.
    """
    given = {"criterion": criterion, "loss_fn": loss_fn, "optimizer": optimizer}
    workload = workload_of(model, sample_batch, **given, global_batch=global_batch)
    report = search(
        workload,
        vram_budget=vram_budget,
        device=device,
        strategies=[],
        max_probes=max_probes,
        timeout=timeout,
        progress=progress,
        options=_with_even_split(SearchOptions() if options is None else options),
    )
    chosen = report.record.recommended
    return BatchSize(
        chosen.plan.micro_batch,
        chosen.plan.accumulation_steps,
        chosen.plan.samples_per_step,
        chosen.measurement.held_bytes,
        report.record.speed_of(chosen),
        max(trial.plan.micro_batch for trial in report.trials if trial.ok),
        report.is_decided,
        report.warnings,
        report,
    )


def _with_even_split(options: SearchOptions) -> SearchOptions:
    if not isinstance(options, SearchOptions):  # which the search refuses
        return options
    if (ranks := ranks_meant(options.ranks)) > 1:
        raise InvalidArgument(
            f"find_batch_size is for one process, not {ranks} ranks: use autofit.search"
        )
    return replace(options, even_split=True)
