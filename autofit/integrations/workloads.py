"""What the integrations share to make a workload out of another library's training, and search it.

The baseline of such a search is the training as it is, its own mixed precision included.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from autofit.errors import InvalidRequest
from autofit.registry import load_strategies
from autofit.report.report import Report
from autofit.strategy import Strategy
from autofit.training.workload import Workload

MOST_EXAMINED = 10_000
"""Samples of a data set that are looked at for the longest ones, evenly spread over it."""
_BATCHES = 32
"""Batches that are looked at where a loader makes no samples of its own to choose from."""


def longest_batch(loader: Any, examine: int = MOST_EXAMINED, batch_size: int | None = None) -> Any:
    """Return a batch of a loader's longest samples.

    Args:
        loader: a `DataLoader`; of any other iterable, and of streamed data, the longest of the
            first batches is taken.
        examine: samples to look at, evenly spread over the data set.
        batch_size: samples of a batch; None: as the loader says.

    Raises:
        InvalidRequest: it delivers nothing.
    """
    dataset = getattr(loader, "dataset", None)
    samples = batch_size or getattr(loader, "batch_size", None)
    streams = isinstance(dataset, torch.utils.data.IterableDataset)
    if streams or not samples or not hasattr(dataset, "__getitem__"):
        batches = list(islice(iter(loader), _BATCHES))
        if not batches:
            raise InvalidRequest("the training data delivered no batch: give sample_batch=")
        return _plain(max(batches, key=_length))
    whole: Any = dataset
    count = min(len(whole), examine)
    if count == 0:
        raise InvalidRequest("the training data set is empty: give sample_batch=")
    places = (place * len(whole) // count for place in range(count))
    found = heapq.nlargest(samples, ((_length(whole[place]), -place) for place in places))
    chosen = [whole[-place] for _, place in found]
    return _plain(loader.collate_fn([chosen[at % len(chosen)] for at in range(samples)]))


def _plain(batch: Any) -> Any:
    """Return a tokenizer's output as a dictionary."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _length(sample: Any) -> int:
    """Return the number of values in a sample or a batch: of tensors, arrays and lists."""
    if isinstance(sample, Mapping):
        return sum(map(_length, sample.values()))
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    size = getattr(sample, "size", None)  # of an array
    if isinstance(size, int):
        return size
    if isinstance(sample, (list, tuple)):
        is_flat = not sample or isinstance(sample[0], (int, float))
        return len(sample) if is_flat else sum(map(_length, sample))
    return 1


def own_autocast(model: torch.nn.Module, precision: str | None) -> AbstractContextManager[Any]:
    """Return the autocast of a training's own mixed precision, on the model's device."""
    if precision is None:
        return nullcontext()
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype=getattr(torch, precision))


def search_as_is(
    workload: Workload,
    *,
    precision: str | None,
    strategies: Iterable[str | Strategy] | None,
    numerics: Any,
    notes: Iterable[str],
    apply: Sequence[str],
    **options: Any,
) -> Report:
    """Search a workload that may have mixed precision of its own, which every plan then keeps.

    Args:
        workload: its loss enters that precision.
        precision: the type of its autocast; None: it has none, and types are searched.
        strategies, numerics, options: as for `autofit.search`.
        notes: for the reader of the report.
        apply: lines of code that train by the report.
    """
    from autofit.searching.search import search

    chosen = load_strategies(strategies, numerics=numerics)
    if precision:
        chosen = tuple(s for s in chosen if "autocast" not in getattr(s, "standard_terms", ()))
    report = search(workload, strategies=chosen, numerics=numerics, **options)
    record = report.record
    facts = {**record.workload, "apply": list(apply)}
    told = replace(record, notes=(*record.notes, *notes), workload=facts)
    return replace(report, record=told)


def precision_note(precision: str, source: str) -> str:
    """Return what a report says of a precision that was kept; `source` is what asks for it."""
    scaling = ", though without float16's scaling of the loss" if precision == "float16" else ""
    return (
        f"every plan ran under autocast in {precision}, since {source} asks for it{scaling}; "
        "without it other types are tried as well"
    )


@contextmanager
def in_training_mode(model: torch.nn.Module) -> Iterator[None]:
    """Have the model in training mode, as it trains; a loaded one is in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
