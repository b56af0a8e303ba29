"""What the samples of an optimizer step are, and how they become micro-batches.

There are three kinds, decided once by what the workload was given and kept in the record:

- rows: a batch of tensors, cut along dimension 0 of those that hold samples;
- samples: a list, of which `collate_fn` makes a batch of each micro-batch's own;
- a function n -> batch of n samples, which is called for each micro-batch and believed about n.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

import torch

from autofit.errors import InvalidArgument, release_exception, users_code
from autofit.training.batch import (
    Batch,
    BatchMaker,
    FlatBatch,
    batch_size,
    named_tensors,
    pieces,
    places_in_turn,
)
from autofit.units import kind_of, shortened

# A list of samples -> a batch of them, as `DataLoader` takes it.
CollateFn: TypeAlias = Callable[[list[Any]], Batch]

_MAX_NAMED = 3  # tensors in a message


class SamplesKind(StrEnum):
    """What the samples of a training are, as a record says it."""

    ROWS = "rows"
    COLLATED = "collate_fn"
    MADE = "function"


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of an optimizer step, made already; `Training.step` takes them as a batch.

    Attributes:
        batches: in the order in which they run, each flattened already.
        sizes: the samples of each.
        divide: sizes -> the same samples in micro-batches of those sizes; None: they cannot be
            divided otherwise.
    """

    batches: tuple[FlatBatch, ...]
    sizes: tuple[int, ...]
    divide: Callable[[tuple[int, ...]], MicroBatches] | None = None


class Samples(ABC):
    """How what a training step is given becomes micro-batches."""

    kind: ClassVar[SamplesKind]

    @abstractmethod
    def size(self, given: Any) -> int | None:
        """Return the number of samples in what a step is given; None: as many as the plan says.

        Raises:
            InvalidArgument: it is of another kind, has no samples, or contradicts itself.
        """

    @abstractmethod
    def divided(self, given: Any, sizes: Sequence[int]) -> Iterator[Any]:
        """Yield parts of what a step is given, of those sizes and of its own kind.

        Raises:
            InvalidArgument: it cannot be divided.
        """

    def micro_batches(self, given: Any, sizes: Sequence[int]) -> Iterator[FlatBatch]:
        """Yield a batch for each of these sizes, in order."""
        yield from map(FlatBatch.of, self.divided(given, sizes))

    def step_of(self, given: Any, sizes: Sequence[int]) -> MicroBatches:
        """Return what a step is given in micro-batches of these sizes."""
        made = tuple(self.micro_batches(given, sizes))
        return MicroBatches(made, tuple(sizes), partial(self.step_of, given))


@dataclass(frozen=True)
class Rows(Samples):
    """Tensors that hold a sample in each place of dimension 0, by their names in `describe`.

    Attributes:
        batched: names of the tensors with a sample in each place of dimension 0.
        whole: names of the others, which every micro-batch gets as they are.
    """

    kind = SamplesKind.ROWS

    batched: frozenset[str]
    whole: frozenset[str]

    @classmethod
    def of(cls, batch: Batch) -> Rows:
        """Find them by the rule of `autofit.training.batch`."""
        return cls.of_size(batch, batch_size(batch))

    @classmethod
    def of_size(cls, batch: Batch, size: int) -> Rows:
        """Find those that have this many samples."""
        named = named_tensors(batch)
        batched = frozenset(name for name, t in named if t.dim() > 0 and t.shape[0] == size)
        return cls(batched, frozenset(name for name, _ in named) - batched)

    @classmethod
    def made_by(cls, maker: BatchMaker) -> Rows | None:
        """Tell them by batches of two and three samples; None: those do not tell.

        Every tensor must have as many rows as samples were asked for, or be the same in both. (One
        batch alone may have a constant tensor of just its size.)
        """
        fewer, more = (dict(named_tensors(maker(samples))) for samples in (2, 3))
        if fewer.keys() != more.keys():
            return None
        batched = frozenset(
            name for name in fewer if (_dim0(fewer[name]), _dim0(more[name])) == (2, 3)
        )
        alike = all(
            fewer[name].shape[name in batched :] == more[name].shape[name in batched :]
            for name in fewer
        )
        return cls(batched, frozenset(fewer) - batched) if batched and alike else None

    def places(self, batch: Batch) -> frozenset[int]:
        """Return which of `tensors_of(batch)` hold samples; `size` has checked them."""
        named = named_tensors(batch)
        return frozenset(i for i, (name, _) in enumerate(named) if name in self.batched)

    def size(self, given: Batch) -> int:
        """Return the number of samples in the batch.

        Raises:
            InvalidArgument: the batch has a tensor that the sample batch lacked, no tensor of it
                holds samples, or those that do have none or unequal numbers of them.
        """
        named = named_tensors(given)
        if strangers := {name for name, _ in named} - self.batched - self.whole:
            raise InvalidArgument(
                f"the batch has {_listed(strangers)}, which the sample batch did "
                "not have, so it is unknown whether it holds samples: train on batches "
                f"with the tensors of the sample batch ({_listed(self.batched | self.whole)}), "
                "search again with such a batch, or search with samples and "
                "Workload(collate_fn=) where the number of tensors varies"
            )
        sizes = {name: tuple(t.shape[:1]) for name, t in named if name in self.batched}
        if not sizes:
            raise InvalidArgument(
                f"the batch ({kind_of(FlatBatch.of(given).whole())}) has none of the tensors "
                "that hold samples in the sample batch "
                f"({_listed(self.batched)}): pass batches with these"
            )
        if len(set(sizes.values())) != 1 or () in sizes.values():
            told = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise InvalidArgument(
                "the tensors that hold samples must agree in dimension 0, but this batch "
                f"has {told}"
            )
        (samples,) = next(iter(sizes.values()))
        if samples == 0:
            raise InvalidArgument("the batch is empty: its tensors have 0 samples; leave it out")
        return samples

    def divided(self, given: Batch, sizes: Sequence[int]) -> Iterator[Batch]:
        if len(sizes) == 1:
            yield given
        else:
            yield from pieces(given, tuple(sizes), self.places(given))


@dataclass(frozen=True)
class Collated(Samples):
    """A list of samples, of which a function makes batches.

    Attributes:
        collate_fn: of the user, as a `DataLoader` takes it.
        rows: how a batch that it made, which a step may be given too, is cut; None: it cannot be.
        dimensions: of the tensors of such a batch, by name. A list of two samples may have tensors
            of the same names.
    """

    kind = SamplesKind.COLLATED

    collate_fn: CollateFn
    rows: Rows | None = None
    dimensions: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, collate_fn: CollateFn, sample: Any) -> Collated:
        """Find the rows of its batches by those of one sample, twice and three times.

        Not where samples are tensors and a batch is a list of them: which of both a step is given
        could not be told.
        """
        made = cache(lambda samples: collate_fn([sample] * samples))
        try:
            if isinstance(sample, torch.Tensor) and isinstance(made(1), (list, tuple)):
                return cls(collate_fn)
            return cls(collate_fn, Rows.made_by(made), _dimensions(made(2)))
        except Exception as error:  # of the user's function, which steps will name
            release_exception(error)
            return cls(collate_fn)

    def is_batch(self, given: Any) -> bool:
        """Return whether this is a batch that the function made, by its tensors."""
        return self.rows is not None and _dimensions(given) == self.dimensions

    def size(self, given: Any) -> int:
        if not is_sample_sequence(given):
            raise InvalidArgument(
                "this training makes its batches by collate_fn, so a step takes a list of samples, "
                f"got {kind_of(given)}: pass the samples themselves, as "
                "DataLoader(..., collate_fn=list) delivers them"
            )
        if not len(given):
            raise InvalidArgument("the step got an empty list of samples: leave it out")
        return len(given)

    def divided(self, given: Sequence[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            yield [given[place] for place in range(end - size, end)]  # a data set has no slices

    def micro_batches(self, given: Sequence[Any], sizes: Sequence[int]) -> Iterator[FlatBatch]:
        yield from map(self._collated, self.divided(given, sizes))

    def batch(self, samples: list[Any]) -> Batch:
        """Return the batch of these samples.

        Raises:
            InvalidArgument: no tensor is found in it.
            Exception: what the user's function raised.
        """
        return self._collated(samples).whole()

    def _collated(self, samples: list[Any]) -> FlatBatch:
        with users_code():
            made = self.collate_fn(samples)
        return _with_tensors(made, "collate_fn")


@dataclass(frozen=True)
class Made(Samples):
    """Batches of a function n -> batch, of whose tensors nobody knows which hold samples."""

    kind = SamplesKind.MADE

    def size(self, given: Any) -> None:
        return None

    def divided(self, given: Any, sizes: Sequence[int]) -> Iterator[Any]:
        if len(sizes) > 1:
            raise InvalidArgument(
                "a batch of the function n -> batch cannot be divided, since nothing tells which "
                "of its tensors hold samples: give the step such a function, or search with "
                "samples and Workload(collate_fn=)"
            )
        yield given

    def micro_batches(self, given: Any, sizes: Sequence[int]) -> Iterator[FlatBatch]:
        if is_maker(given):
            yield from (_made_by(given, size) for size in sizes)
        else:
            yield from super().micro_batches(given, sizes)


class TakenSamples(tuple[Any, ...]):
    """The first samples of a data set, which has no batch size of its own."""

    __slots__ = ()


# Samples of a data set that are read: more say little more of memory, and may take long to decode.
_MAX_TAKEN = 256
_MIN_TAKEN = 32


def taken_from(given: Any, global_batch: int | None) -> Sequence[Any]:
    """Return the samples that stand for a workload: a list as it is, the first of a data set.

    Raises:
        InvalidArgument: it is no sequence of samples, or an empty one.
        Exception: what the user's data set raised.
    """
    if not is_sample_sequence(given):
        raise InvalidArgument(
            "with collate_fn= the sample batch is a list of samples, or a data set with "
            f"__len__ and __getitem__, got {kind_of(given)}"
        )
    with users_code():
        count = len(given)
    if not count:
        raise InvalidArgument("there are no samples: pass at least one")
    if isinstance(given, (list, tuple)):
        return given
    wanted = min(max(global_batch or 0, _MIN_TAKEN), _MAX_TAKEN, count)
    with users_code():
        return TakenSamples(given[place] for place in range(wanted))


def is_sample_sequence(given: Any) -> bool:
    """Return whether these may be samples: not one tensor, one mapping or one text."""
    if isinstance(given, (torch.Tensor, Mapping, str, bytes, MicroBatches)) or hasattr(given, "to"):
        return False
    return hasattr(given, "__len__") and hasattr(given, "__getitem__")


def samples_in_turn(samples: Sequence[Any], sizes: Collection[int]) -> list[Any]:
    """Return this many samples for micro-batches of those sizes; see `places_in_turn`."""
    return [samples[place] for place in places_in_turn(len(samples), sizes).tolist()]


def is_maker(given: Any) -> bool:
    """Return whether it is a function n -> batch: a batch that can be called can also be moved."""
    return callable(given) and not hasattr(given, "to")


def made_by(maker: BatchMaker, samples: int) -> Batch:
    """Return a batch of a user's function.

    Raises:
        InvalidArgument: no tensor is found in it.
        Exception: what the user's function raised.
    """
    return _made_by(maker, samples).whole()


def _made_by(maker: BatchMaker, samples: int) -> FlatBatch:
    with users_code():
        made = maker(samples)
    return _with_tensors(made, "the sample batch function")


def _dimensions(batch: Any) -> dict[str, int]:
    return {name: tensor.dim() for name, tensor in named_tensors(batch)}


def _with_tensors(made: Any, by: str) -> FlatBatch:
    flat = FlatBatch.of(made)
    if not flat.named and not hasattr(made, "to"):
        raise InvalidArgument(
            f"{by} must return a batch that holds tensors, got {kind_of(made)}: return tensors, "
            "containers of them, or an object with .to(device)"
        )
    return flat


def samples_in(given: Any, samples: Samples | None) -> tuple[Samples, Any]:
    """Return how what a step is given becomes micro-batches, and that: a batch of rows is flat.

    Args:
        given: to the step.
        samples: of the training; None: rows, told by their sizes.
    """
    if isinstance(samples, Collated):
        if samples.rows is None or not samples.is_batch(flat := FlatBatch.of(given)):
            return samples, given
        return samples.rows, flat
    if is_maker(given):
        return Made(), given
    flat = FlatBatch.of(given)
    return samples or Rows.of(flat), flat


def rows_of(samples: Samples) -> Rows | None:
    """Return how batches are cut into rows, of samples too, or None if it is not known."""
    return samples if isinstance(samples, Rows) else getattr(samples, "rows", None)


def _dim0(tensor: torch.Tensor) -> int | None:
    return tensor.shape[0] if tensor.dim() else None


def _listed(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    return shortened(sorted(names), _MAX_NAMED)
