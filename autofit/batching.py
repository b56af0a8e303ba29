"""Batches as pytrees: how many samples one holds, and how it is grown, cut and described.

The rule: the batch size n is the size of dimension 0 of the first tensor that has dimensions;
every tensor with that size is batched, and everything else stays whole. Growing repeats the
batch's own samples in turn, so that token ids, labels and masks stay valid.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree  # torch 2.11 to 2.13 have no public one

from autofit.errors import InvalidRequest

Batch: TypeAlias = Any
"""Any pytree of tensors: a tensor, a tuple, a mapping, or these nested."""

BatchMaker: TypeAlias = Callable[[int], Batch]
"""n -> a batch of n samples."""

_ASK_FOR_MAKER = "pass a callable n -> batch of n samples as the sample batch instead"


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Every tensor in the batch, in the pytree's order."""
    return [leaf for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor)]


def batch_size(batch: Batch) -> int:
    """The number of samples in the batch.

    Raises:
        InvalidRequest: the batch has no tensor with dimensions, or no samples.
    """
    sized = [tensor for tensor in tensors_of(batch) if tensor.dim() > 0]
    if not sized:
        raise InvalidRequest(
            f"the sample batch (a {type(batch).__name__}) has no tensor with a dimension for "
            f"samples: {_ASK_FOR_MAKER}"
        )
    if sized[0].shape[0] == 0:
        raise InvalidRequest("the sample batch is empty: its first tensor has 0 samples")
    return sized[0].shape[0]


def check_batched_dimension(batch: Batch) -> None:
    """Refuse a sample batch whose samples the rule cannot tell apart.

    Raises:
        InvalidRequest: it has one sample, and more than one tensor of size 1 in dimension 0.
    """
    candidates = [t for t in tensors_of(batch) if t.dim() > 0 and t.shape[0] == 1]
    if batch_size(batch) == 1 and len(candidates) > 1:
        raise InvalidRequest(
            f"the sample batch has one sample, and {len(candidates)} of its tensors have size 1 in "
            f"dimension 0, so which of them hold samples cannot be told: give a batch of two or "
            f"more samples, or {_ASK_FOR_MAKER}"
        )


def resize(batch: Batch, samples: int) -> Batch:
    """A batch of `samples` samples, made of this batch's own in turn.

    Batched tensors of shape [n, ...] become [samples, ...]; the rest is the same object.
    """
    size = batch_size(batch)
    if samples == size:
        return batch
    index = torch.arange(samples) % size
    return _map_batched(batch, size, lambda tensor: tensor.index_select(0, index.to(tensor.device)))


def pieces(batch: Batch, sizes: tuple[int, ...]) -> Iterator[Batch]:
    """The batch cut into consecutive pieces of those sizes (views, in order)."""
    size = batch_size(batch)
    start = 0
    for length in sizes:
        yield _map_batched(batch, size, operator.itemgetter(slice(start, start + length)))
        start += length


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """The batch with `function` applied to each tensor."""
    return pytree.tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, _plain(batch)
    )


def describe(batch: Batch) -> dict[str, str]:
    """Where each tensor stands in the batch -> its dtype and shape, as text."""
    leaves, _ = pytree.tree_flatten_with_path(_plain(batch))
    return {
        pytree.keystr(path)
        or "batch": f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }


def _map_batched(
    batch: Batch, size: int, function: Callable[[torch.Tensor], torch.Tensor]
) -> Batch:
    def visit(tensor: torch.Tensor) -> torch.Tensor:
        return function(tensor) if tensor.dim() > 0 and tensor.shape[0] == size else tensor

    return map_tensors(visit, batch)


def _leaves(batch: Batch) -> list[Any]:
    return pytree.tree_leaves(_plain(batch))


def _plain(batch: Batch) -> Batch:
    """Mappings that torch does not know as containers (a tokenizer's output, say) as dicts."""
    if isinstance(batch, Mapping) and type(batch) not in pytree.SUPPORTED_NODES:
        return dict(batch)
    return batch
