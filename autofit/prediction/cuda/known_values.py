"""Values that a rehearsal knows: those of the batch's numbers, and what follows from them alone.

A rehearsal computes nothing; yet models look at the batch (is there padding in this attention
mask? how long is the longest sample?), and these values were handed over with the sample batch.
So whole numbers and booleans of the batch are kept beside their meta tensors, on the CPU, and
operators whose arguments are all known, or constant, are also run there. What a model computes
with its weights remains unknown.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch 2.11 to 2.13 have no public one

from autofit.memory.tracer import tensors_in

MOST_ELEMENTS = 2**23
"""Larger tensors are not followed: a rehearsal is to cost neither time nor memory."""
_CONSTANTS = frozenset({"aten::arange", "aten::full", "aten::zeros", "aten::ones", "aten::eye"})

_EMPTY_LIKE = "aten::empty_like"
"""What it makes of known numbers is to be filled with others (a permutation is inverted so)."""


class KnownValues:
    """The values of some meta tensors, by their storages."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}

    def learn(self, tensor: torch.Tensor, values: torch.Tensor | None) -> None:
        """Keep the values of a meta tensor, the first of its storage, if they are not too many."""
        if values is None or values.numel() > MOST_ELEMENTS or not tensor.is_meta:
            return
        real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        key = storage._cdata
        gone = weakref.ref(storage, lambda _: self._values.pop(key, None))
        self._values[key] = gone, real.copy_(values).untyped_storage()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor's values on the CPU, where a meta tensor's are known."""
        if not tensor.is_meta:
            return tensor
        known = self._values.get(_key(tensor))
        if known is None:
            return None
        real = torch.empty(0, dtype=tensor.dtype)
        return real.set_(known[1], tensor.storage_offset(), tensor.shape, tensor.stride())

    def arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """An operator's arguments with values in place of meta tensors; None: not all are known."""
        name = func._schema.name
        if func.is_view or ("empty" in name and name != _EMPTY_LIKE):
            return None  # shares its argument's storage, and so its values; or has none
        given = list(tensors_in((args, kwargs)))
        if not any(tensor.is_meta for tensor in given) and not _is_for_meta(func, given, kwargs):
            return None  # what only the host computes is computed once
        if any(self._is_unknown(tensor) for tensor in given):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        real: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, self.of, (args, dict(kwargs)))
        if real[1].get("device") is not None:
            real[1]["device"] = torch.device("cpu")
        return real

    def answer(self, func: Any, real: tuple[Any, Any]) -> Any:
        """What an operator returns, told from the values of its arguments."""

        def on_device(values: torch.Tensor) -> torch.Tensor:
            tensor = torch.empty_strided(
                values.shape, values.stride(), dtype=values.dtype, device="meta"
            )
            self.learn(tensor, values)
            return tensor

        return pytree.tree_map_only(torch.Tensor, on_device, func(*real[0], **real[1]))

    def follow(self, func: Any, real: tuple[Any, Any] | None, args: Any, result: Any) -> None:
        """Learn an operator's results, and what it changed, where its arguments were known."""
        if func._schema.is_mutable:
            if real is None:
                self._forget(args)
            else:
                func(*real[0], **real[1])
            return
        results = list(tensors_in(result))
        small = all(tensor.numel() <= MOST_ELEMENTS for tensor in results)
        if real is None or not results or not small or not results[0].is_meta:
            return
        with suppress(Exception):  # what the CPU cannot do stays unknown
            for tensor, values in zip(results, tensors_in(func(*real[0], **real[1])), strict=True):
                self.learn(tensor, values.zero_() if func._schema.name == _EMPTY_LIKE else values)

    def _is_unknown(self, tensor: torch.Tensor) -> bool:
        """Of the host's tensors too, those that may be weights are not followed to the device."""
        if tensor.is_meta:
            return _key(tensor) not in self._values
        return tensor.dim() > 0 and not is_number(tensor)

    def _forget(self, args: Any) -> None:
        if self._values:
            for tensor in tensors_in(args):
                if tensor.is_meta:
                    self._values.pop(_key(tensor), None)


def is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a batch may be looked at by a model: whole numbers and booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _is_for_meta(func: Any, given: list[torch.Tensor], kwargs: Any) -> bool:
    """Whether an operator makes a constant on the device, or moves one there."""
    device = kwargs.get("device")
    on_meta = device is not None and torch.device(device).type == "meta"
    return on_meta and (bool(given) or func._schema.name in _CONSTANTS)
