"""Sample batches from a loader: its longest samples, or batches of three lengths.

Samples are looked at for some seconds at most; where they have no length, as images have none, a
few are.
"""

from __future__ import annotations

import heapq
import random
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from autofit.errors import InvalidArgument
from autofit.plan import check_count
from autofit.snapshot import process
from autofit.training.batch import batch_size, describe
from autofit.training.lengths import Lengths
from autofit.training.samples import CollateFn
from autofit.units import kind_of

# Samples of a data set that are looked at for the longest ones, evenly spread over it.
MAX_EXAMINED = 10_000
# Batches that are looked at where a loader makes no samples of its own to choose from.
_BATCHES = 32
# Samples that tell whether lengths are worth looking for: images have none, and take long.
_FIRST = 32
# As long as a worker takes to start on a busy machine: what has been found by then is taken.
_SECONDS = 10.0


@dataclass(frozen=True)
class LoaderBatch:
    """What a workload takes for a sample batch, from a loader.

    Attributes:
        given: a list of samples; or a batch, where the loader has no samples to choose from.
        collate_fn: of the loader, which makes a batch of samples; None: `given` is a batch.
    """

    given: Any
    collate_fn: CollateFn | None = None

    @property
    def batch(self) -> Any:
        """As the loader makes it."""
        return self.given if self.collate_fn is None else self.collate_fn(self.given)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return batch_size(self.given) if self.collate_fn is None else len(self.given)


def longest_samples(
    loader: Any,
    examine: int = MAX_EXAMINED,
    batch_size: int | None = None,
    *,
    seconds: float = _SECONDS,
) -> LoaderBatch:
    """Return a loader's longest samples, as many as its batches have.

    Where samples have no part whose length could vary (a text, or one dimension of values such as
    token ids), as images have none, a few are looked at in place of `examine`.

    Args:
        loader: a `DataLoader`; of any other iterable, and of streamed data, the longest of the
            first batches is taken.
        examine: samples to look at, spread over the data set.
        batch_size: samples of a batch; None: as the loader says.
        seconds: after this many the longest that were found are taken, with a warning.

    Raises:
        InvalidArgument: it delivers nothing, or only once: it is an iterator.
    """
    _check_restarts(loader)
    with _random_states_kept():
        dataset, samples = _dataset_of(loader, batch_size)
        if dataset is None:
            return LoaderBatch(_first_batches(loader, _BATCHES, seconds, kept=1)[-1])
        places = _places(dataset, examine)
        measured = _measured((dataset[place] for place in places), len(places), seconds)
        longest = [sample for *_, sample in heapq.nlargest(samples, measured)]
        return LoaderBatch(_in_turn(longest, samples), PlainCollate(loader.collate_fn))


def from_loader(loader: Any, n: int = MAX_EXAMINED) -> Lengths:
    """Return batches of three lengths that a loader makes, to be a workload's sample batch.

    They are the batch that is longer than a quarter of all, that which is longer than three
    quarters, and the longest samples together. The first two stand for half of the steps each; the
    last bounds the memory alone. Batches that are padded to one length are one batch.

    Args:
        loader: a `DataLoader`. Samples of its dataset are looked at, for ten seconds at most; the
            workload puts them together by its `collate_fn`. Of any other iterable, and of streamed
            data, the first batches are looked at, and taken as they are.
        n: samples to look at, spread over the data set.

    Raises:
        InvalidArgument: it is no loader, it delivers nothing or only once, or n is no count.
    """
    if not isinstance(loader, Iterable):
        raise InvalidArgument(f"from_loader takes a DataLoader, got {kind_of(loader)}")
    _check_restarts(loader)
    n = check_count("n", n)
    with _random_states_kept():
        three = _three_batches(loader, n)
        merged: dict[str, tuple[float, Any]] = {}
        for weight, each in zip((1.0, 1.0, 0.0), three, strict=True):
            shapes = str(describe(each.batch))
            merged[shapes] = weight + merged.get(shapes, (0.0, None))[0], each.given
    weights, distinct = zip(*merged.values(), strict=True)
    return Lengths(distinct, weights, collate_fn=three[-1].collate_fn)


def _check_restarts(loader: Any) -> None:
    """Refuse an iterator, such as a generator: the training would miss the batches read here."""
    if isinstance(loader, Iterator) and iter(loader) is loader:
        raise InvalidArgument(
            f"{kind_of(loader)} can be read only once, and the training would miss those that "
            "autofit reads: pass the loader itself, not an iterator over it"
        )


def _three_batches(loader: Any, examine: int) -> list[LoaderBatch]:
    """Return the batches at both quartiles of length, and the longest."""
    dataset, samples = _dataset_of(loader, None)
    if dataset is None:
        count = min(examine, _BATCHES)
        batches = _first_batches(loader, count, _SECONDS, kept=count)
        return list(map(LoaderBatch, [*_quartiles(batches), batches[-1]]))
    collate_fn = PlainCollate(loader.collate_fn)
    return [
        LoaderBatch(_in_turn([dataset[at] for at in places], samples), collate_fn)
        for places in _three_lengths(dataset, examine, samples)
    ]


def _three_lengths(dataset: Any, examine: int, samples: int) -> list[list[int]]:
    """Return the places of the samples of each batch: of both quartiles, and of the longest.

    A batch is as long as the longest of some samples at random. Places, not samples: all that are
    looked at may not fit into memory.
    """
    places = _places(dataset, examine)
    seen = _measured((dataset[place] for place in places), len(places), _SECONDS)
    measured = [(length, place) for (length, *_), place in zip(seen, places, strict=False)]
    batches = [measured[at : at + samples] for at in range(0, len(measured), samples)]
    chosen = [*_quartiles(sorted(batches, key=max)), heapq.nlargest(samples, measured)]
    return [[place for _, place in batch] for batch in chosen]


def _quartiles(ordered: Sequence[Any]) -> tuple[Any, Any]:
    return ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put the random states back: data sets that augment their samples draw random numbers."""
    states = process.random_states()
    try:
        yield
    finally:
        process.restore(states)


def _dataset_of(loader: Any, batch_size: int | None) -> tuple[Any, int]:
    """Return the data set whose samples can be looked at, and the samples of a batch.

    None in its place: there is none, or it is streamed.
    """
    dataset = getattr(loader, "dataset", None)
    samples = batch_size or getattr(loader, "batch_size", None)
    streams = isinstance(dataset, torch.utils.data.IterableDataset)
    if streams or not samples or not hasattr(dataset, "__getitem__"):
        return None, 0
    return dataset, samples


def _first_batches(loader: Any, count: int, seconds: float, kept: int) -> list[Any]:
    """Return the longest of the first batches, the shortest first."""
    found = heapq.nlargest(kept, _measured(islice(iter(loader), count), count, seconds))
    if not found:
        raise InvalidArgument("the training data yielded no batch: pass sample_batch=")
    return [_plain(batch) for *_, batch in reversed(found)]


def _places(dataset: Any, examine: int) -> list[int]:
    """Return places of samples that are spread over a data set, in a random order.

    So those that are seen within the time are spread, too.
    """
    count = min(len(dataset), examine)
    if count == 0:
        raise InvalidArgument("the training dataset is empty: pass sample_batch=")
    places = [place * len(dataset) // count for place in range(count)]
    random.Random(0).shuffle(places)
    return places


def _in_turn(chosen: Sequence[Any], samples: int) -> list[Any]:
    return [chosen[at % len(chosen)] for at in range(samples)]


@dataclass(frozen=True)
class PlainCollate:
    """A loader's `collate_fn`, whose mappings become dicts.

    Attributes:
        of_loader: list of samples -> batch.
    """

    of_loader: CollateFn

    def __call__(self, samples: list[Any]) -> Any:
        return _plain(self.of_loader(samples))


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch  # of a tokenizer


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
                    f"{seconds:.0f} s: if others are longer, pass sample_batch=, or have fewer "
                    "examined"
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
