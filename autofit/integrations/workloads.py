"""What the integrations share to make a workload out of another library's training, and search it.

The baseline of such a search is the training as it is, its own mixed precision included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autofit.integrations.loader_batches import LoaderBatch, longest_samples
from autofit.registry import Unnamed, load_strategies
from autofit.report.report import Report
from autofit.strategy import Strategy
from autofit.training.batch import tensors_of
from autofit.training.workload import Workload

if TYPE_CHECKING:
    from autofit.searching.options import SearchOptions


def own_autocast(model: torch.nn.Module, precision: str | None) -> AbstractContextManager[Any]:
    """Return the autocast of a training's own mixed precision, on the model's device."""
    if precision is None:
        return nullcontext()
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype=getattr(torch, precision))


def longest_of(loaders: Any, examine: int, batch_size: int | None = None) -> LoaderBatch | None:
    """Return the longest samples of a loader, or of several; None: there is none.

    Args:
        loaders: one, or a list or mapping of them.
        examine, batch_size: see `longest_samples`.
    """
    several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    if not isinstance(several, (list, tuple)):
        return None if several is None else longest_samples(several, examine, batch_size)
    found = [longest_samples(each, examine, batch_size) for each in several]
    return max(found, key=lambda each: sum(t.numel() for t in tensors_of(each.batch)), default=None)


def search_workload(
    workload: Workload,
    *,
    precision: str | None,
    asked_by: str,
    strategies: Iterable[str | Strategy] | None,
    numerics: Any,
    notes: Iterable[str],
    trainer: str,
    options: SearchOptions | None,
    **more: Any,
) -> Report:
    """Search what a trainer trains: in micro-batches of one size, as its loader makes them.

    Mixed precision of its own is kept by every plan, and a note says so.

    Args:
        workload: its loss enters that precision.
        precision: the type of its autocast; None: it has none, and types are searched.
        asked_by: what asks for that precision.
        strategies, numerics, options, more: as for `autofit.search`.
        notes: for the reader of the report.
        trainer: the name of the integration in `autofit.report.paste.LINES_OF_TRAINER`.
    """
    from autofit.searching.options import SearchOptions
    from autofit.searching.search import search

    loaded = load_strategies(strategies, numerics=numerics)
    kept = [getattr(each, "in_anothers_loop", lambda each=each: each)() for each in loaded]
    if precision:
        kept = [each for each in kept if "autocast" not in getattr(each, "standard_terms", ())]
    strategies = Unnamed(kept) if strategies is None else kept
    even = replace(SearchOptions() if options is None else options, even_split=True)
    report = search(workload, strategies=strategies, numerics=numerics, options=even, **more)
    if precision:
        scaling = "; float16's loss scaling was left out" if precision == "float16" else ""
        note = (
            f"every plan ran under autocast in {precision}, because {asked_by} asks for "
            f"it{scaling}; without it, other precisions are searched too"
        )
        notes = [note, *notes]
    record = report.record
    facts = {**record.workload, "trainer": trainer}
    told = replace(record, notes=(*record.notes, *notes), workload=facts)
    return replace(report, record=told)
