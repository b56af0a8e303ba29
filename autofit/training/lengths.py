"""How long samples are: batches of several lengths, and the tokens of a sample.

Of several lengths memory is that of the longest, speed that of the mix.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autofit.errors import InvalidArgument
from autofit.training.batch import (
    Batch,
    batch_size,
    elements_of,
    named_tensors,
)
from autofit.training.samples import Collated, CollateFn, taken_from

# The names that tokenizers give.
_IDS, _MASK = "input_ids", "attention_mask"


@dataclass(frozen=True)
class Lengths:
    """Sample batches of several lengths, as a training sees them in turn.

    Not a plain list, since a batch may be one. A plan must hold the longest, the batch with most
    elements a sample; its speed is that of the mix: the mean time of a step over the lengths.

    Attributes:
        batches: one of each length, with the same tensors; with collate_fn, a list of samples each.
        weights: how often each comes, in any unit; None: all as often. 0 for a batch that bounds
            the memory alone.
        collate_fn: list of samples -> a batch of them; None: that of the workload, if it has one.

    Raises:
        InvalidArgument: there is no batch; their tensors differ in name, type or number of
            dimensions; or the weights are not a number of 0 or more for each, some above 0. Of
            batches that are lists, which may be of samples, the tensors are compared by the
            workload that takes them.
    """

    batches: Sequence[Batch]
    weights: Sequence[float] | None = None
    collate_fn: CollateFn | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.batches, (list, tuple)) or not self.batches:
            raise InvalidArgument(
                f"Lengths takes a list of batches, one of each length, got {str(self.batches)[:80]}"
            )
        if self.collate_fn is None and not all(isinstance(each, list) for each in self.batches):
            self.check_alike()
        for batch in self.batches if self.collate_fn is not None else ():
            taken_from(batch, None)  # refuses what is no list of samples
        count = len(self.batches)
        weights = [1.0] * count if self.weights is None else list(self.weights)
        if len(weights) != count or not all(map(_is_weight, weights)) or not any(weights):
            raise InvalidArgument(
                f"the weights of Lengths must be {count} numbers of 0 or more, one for each batch "
                f"and some above 0, got {self.weights!r}"
            )
        object.__setattr__(self, "batches", tuple(self.batches))
        object.__setattr__(self, "weights", tuple(weights))

    def check_alike(self) -> None:
        """Refuse batches of tensors that differ in more than their lengths.

        Raises:
            InvalidArgument: they do.
        """
        first, *others = map(_kinds, self.batches)
        for place, kinds in enumerate(others, start=1):
            if kinds != first:
                unlike = sorted({*first.items()} ^ {*kinds.items()})
                told = ", ".join(dict.fromkeys(name for name, _ in unlike))
                raise InvalidArgument(
                    f"the batches of Lengths must have the same tensors, but batch {place} differs "
                    f"from the first in {told}: give batches that differ in their lengths alone"
                )

    @property
    def longest(self) -> Batch:
        """The batch, or the samples, with most elements a sample."""
        return self.mix[-1][1]

    @property
    def mix(self) -> list[tuple[float, Batch]]:
        """Each batch, or list of samples, with its share of the steps, the shortest first."""
        weights = self.weights or ()
        ordered = sorted(
            zip(weights, self.batches, strict=True), key=lambda each: self._length(each[1])
        )
        return [(weight / sum(weights), batch) for weight, batch in ordered]

    def _length(self, given: Any) -> float:
        """Return the elements of a sample."""
        if self.collate_fn is None:
            batch, samples = given, batch_size(given)
        else:
            batch, samples = Collated(self.collate_fn).batch(list(given)), len(given)
        return elements_of(batch) / samples


def _is_weight(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < math.inf


def _kinds(batch: Batch) -> dict[str, tuple[str, int]]:
    """Return the type and the number of dimensions of each tensor, by name."""
    return {name: (str(tensor.dtype), tensor.dim()) for name, tensor in named_tensors(batch)}


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch's samples.

    Attributes:
        counted: where the tensor stands in the batch that holds their ids.
        per_sample: its length, padding included; of several lengths, the mean.
        padding_share: of those; None: no attention mask tells.
    """

    counted: str
    per_sample: int
    padding_share: float | None = None


def tokens_of(batch: Batch, batched: Collection[str]) -> Tokens | None:
    """Return the tokens of a batch; None: it has none.

    Token ids are the integers of shape [samples, length] that are named input_ids, or else those
    that come first in the batch.

    Args:
        batch: of the training.
        batched: names of the tensors that hold samples.
    """
    named = {name: tensor for name, tensor in named_tensors(batch) if name in batched}
    ids = next((name for name in named if _IDS in name), next(iter(named), ""))
    if ids not in named or not _is_of_tokens(named[ids]):
        return None
    masks = [
        tensor
        for name, tensor in named.items()
        if _MASK in name and tensor.shape == named[ids].shape
    ]
    padding = float((masks[0] == 0).double().mean()) if masks else None
    return Tokens(ids, named[ids].shape[1], padding)


def tokens_of_mix(mix: Iterable[tuple[float, Batch]], batched: Collection[str]) -> Tokens | None:
    """Return the mean tokens of a sample over several lengths; None: one of them has none.

    Args:
        mix: a batch of each length, with its share of the steps.
        batched: names of the tensors that hold samples.
    """
    found = [(share, tokens_of(batch, batched)) for share, batch in mix]
    known = [(share, tokens) for share, tokens in found if tokens is not None]
    if len(known) < len(found):
        return None
    mean = sum(share * tokens.per_sample for share, tokens in known)
    told = [
        share * tokens.per_sample * tokens.padding_share
        for share, tokens in known
        if tokens.padding_share is not None
    ]
    padding_share = sum(told) / mean if len(told) == len(known) else None
    return Tokens(known[-1][1].counted, round(mean), padding_share)


def _is_of_tokens(tensor: torch.Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return is_integer and tensor.dtype != torch.bool and tensor.dim() == 2 and tensor.shape[1] > 1
