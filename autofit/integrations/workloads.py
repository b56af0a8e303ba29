"""What the integrations share to make a workload out of another library's training, and search it.

The baseline of such a search is the training as it is, its own mixed precision included.
"""

from __future__ import annotations

import heapq
import random
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from autofit.errors import InvalidArgument
from autofit.registry import Unnamed, load_strategies
from autofit.report.report import Report
from autofit.snapshot import process
from autofit.strategy import Strategy
from autofit.training.workload import Workload

if TYPE_CHECKING:
    from autofit.searching.options import SearchOptions

MOST_EXAMINED = 10_000
"""Samples of a data set that are looked at for the longest ones, evenly spread over it."""
_BATCHES = 32
"""Batches that are looked at where a loader makes no samples of its own to choose from."""
_FIRST = 32
"""Samples that tell whether lengths are worth looking for: images have none, and take long."""
_SECONDS = 10.0
"""As long as a worker takes to start on a busy machine: what has been found by then is taken."""


def longest_batch(
    loader: Any,
    examine: int = MOST_EXAMINED,
    batch_size: int | None = None,
    *,
    seconds: float = _SECONDS,
) -> Any:
    """Return a batch of a loader's longest samples.

    Where samples have no part whose length could vary (a text, or one dimension of values such as
    token ids), as images have none, a few are looked at in place of `examine`.

    Args:
        loader: a `DataLoader`; of any other iterable, and of streamed data, the longest of the
            first batches is taken.
        examine: samples to look at, spread over the data set.
        batch_size: samples of a batch; None: as the loader says.
        seconds: after so many the longest that were found are taken, with a warning.

    Raises:
        InvalidArgument: it delivers nothing.
    """
    states = process.random_states()
    try:
        batch = _longest(loader, examine, batch_size, seconds)
        return dict(batch) if isinstance(batch, Mapping) else batch  # of a tokenizer
    finally:
        process.restore(states)  # data sets that augment their samples draw random numbers


def _longest(loader: Any, examine: int, batch_size: int | None, seconds: float) -> Any:
    dataset = getattr(loader, "dataset", None)
    samples = batch_size or getattr(loader, "batch_size", None)
    streams = isinstance(dataset, torch.utils.data.IterableDataset)
    if streams or not samples or not hasattr(dataset, "__getitem__"):
        batches = islice(iter(loader), _BATCHES)
        found = heapq.nlargest(1, _measured(batches, _BATCHES, seconds))
        if not found:
            raise InvalidArgument("the training data yielded no batch: pass sample_batch=")
        return found[0][-1]
    whole: Any = dataset
    count = min(len(whole), examine)
    if count == 0:
        raise InvalidArgument("the training dataset is empty: pass sample_batch=")
    places = [place * len(whole) // count for place in range(count)]
    random.Random(0).shuffle(places)  # so that those seen within the time are spread, too
    measured = _measured((whole[place] for place in places), count, seconds)
    longest = heapq.nlargest(samples, measured)
    chosen = [sample for *_, sample in longest]
    return loader.collate_fn([chosen[at % len(chosen)] for at in range(samples)])


def _measured(found: Iterable[Any], count: int, seconds: float) -> Iterator[tuple[int, int, Any]]:
    """Yield the length of each of these, a number that tells equals apart, and itself."""
    ends_at, varies = time.monotonic() + seconds, False
    for done, one in enumerate(found, start=1):
        yield _length(one), -done, one
        varies = varies or _has_length(one)
        if done < count and time.monotonic() > ends_at:
            warnings.warn(
                (
                    f"{done} of {count} samples were examined for the longest one in "
                    f"{seconds:.0f} s: if others are longer, pass sample_batch=, or a smaller "
                    "examine="
                ),
                stacklevel=2,
            )
            return
        if done == _FIRST and not varies:
            return


def _has_length(sample: Any) -> bool:
    """Return whether a part of a sample is a text, or has one dimension of several values."""
    if isinstance(sample, str):
        return True
    if isinstance(sample, Mapping):
        return any(map(_has_length, sample.values()))
    if isinstance(sample, (list, tuple)):
        return _is_flat(sample) or any(map(_has_length, sample))
    return len(getattr(sample, "shape", ())) == 1 and len(sample) > 1


def _is_flat(sample: Sequence[Any]) -> bool:
    return len(sample) > 1 and all(isinstance(value, (int, float)) for value in sample)


def _length(sample: Any) -> int:
    """Return the number of values in a sample or a batch: of tensors, arrays, lists and texts."""
    if isinstance(sample, Mapping):
        return sum(map(_length, sample.values()))
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    size = getattr(sample, "size", None)  # of an array
    if isinstance(size, int):
        return size
    if isinstance(sample, str):
        return len(sample)
    if isinstance(sample, (list, tuple)):
        return len(sample) if _is_flat(sample) else sum(map(_length, sample))
    return 1


def own_autocast(model: torch.nn.Module, precision: str | None) -> AbstractContextManager[Any]:
    """Return the autocast of a training's own mixed precision, on the model's device."""
    if precision is None:
        return nullcontext()
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype=getattr(torch, precision))


def search_workload(
    workload: Workload,
    *,
    precision: str | None,
    asked_by: str,
    strategies: Iterable[str | Strategy] | None,
    numerics: Any,
    notes: Iterable[str],
    apply: Sequence[str],
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
        apply: lines of code that train by the report.
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
    facts = {**record.workload, "apply": list(apply)}
    told = replace(record, notes=(*record.notes, *notes), workload=facts)
    return replace(report, record=told)


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
