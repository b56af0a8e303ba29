"""Tokens of a batch: how long its samples are, and how much of that is padding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from autofit.training.batch import Batch, describe, tensors_of

# The names that tokenizers give.
_IDS, _MASK = "input_ids", "attention_mask"


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
    whole = zip(describe(batch), tensors_of(batch), strict=True)
    named = {name: tensor for name, tensor in whole if name in batched}
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


def tokens_of_mix(mix: Sequence[tuple[float, Batch]], batched: Collection[str]) -> Tokens | None:
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
