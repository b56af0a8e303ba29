"""Batches as pytrees: how many samples one holds, and how it is grown, cut and described.

The rule: the batch size n is the size of dimension 0 of the first tensor that has dimensions;
every tensor with that size is batched, and everything else stays whole. In a batch of one sample
every tensor with dimensions must have size 1 there: beside others, a 1 may mean anything. Growing
repeats the batch's own samples in turn, so that token ids, labels and masks stay valid.

A batch that was grown may reach the size of a tensor that stays whole (64 position ids beside 64
samples). So which tensors hold samples is decided once, on the sample batch, and known by their
names from then on (`Samples`): to probes, to the report, and to whoever trains by it.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import accumulate
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch

from autofit.errors import InvalidArgument
from autofit.torch_private import pytree
from autofit.units import kind_of

# Any pytree of tensors: a tensor, a tuple, a mapping, a dataclass, or these nested.
Batch: TypeAlias = Any

# n -> a batch of n samples.
BatchMaker: TypeAlias = Callable[[int], Batch]

ASK_FOR_SAMPLES = (
    "pass samples and Workload(collate_fn=), or a function n -> batch of n samples as the sample "
    "batch"
)


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Every tensor in the batch, in the pytree's order.

    Raises:
        InvalidArgument: the batch holds itself, or is nested too deeply.
    """
    try:
        leaves = pytree.tree_leaves(opened(batch))
    except RecursionError as error:
        raise InvalidArgument(
            f"the batch ({kind_of(batch)}) holds itself, or is nested too deeply: give one whose "
            "tensors lie in a few nested lists, mappings or dataclasses"
        ) from error
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def batch_size(batch: Batch) -> int:
    """The number of samples in the batch.

    Raises:
        InvalidArgument: the batch has no tensor with dimensions, or no samples.
    """
    sized = [tensor for tensor in tensors_of(batch) if tensor.dim() > 0]
    if not sized:
        raise InvalidArgument(
            f"the sample batch ({kind_of(batch)}) has no tensor with a dimension for "
            f"samples: {ASK_FOR_SAMPLES}"
        )
    if sized[0].shape[0] == 0:
        raise InvalidArgument("the sample batch is empty: its first tensor has 0 samples")
    return sized[0].shape[0]


def elements_of(batch: Batch) -> int:
    """The elements of all tensors in the batch."""
    return sum(math.prod(shape_of(tensor)) for tensor in tensors_of(batch))


def named_tensors(batch: Batch) -> list[tuple[str, torch.Tensor]]:
    """Where each tensor stands in the batch, and the tensor, in the order of `tensors_of`."""
    leaves, _ = pytree.tree_flatten_with_path(opened(batch))
    return [
        (pytree.keystr(path) or "batch", leaf)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]


def places_in_turn(count: int, sizes: Collection[int]) -> list[int]:
    """Return which of so many samples stand in micro-batches of those sizes, one after the other.

    They are taken in turn. In a micro-batch they keep their order, and a sample that is repeated
    stands next to itself: so lengths that are sorted stay sorted.
    """
    places: list[int] = []
    first = 0
    for size in sizes:
        places += sorted(place % count for place in range(first, first + size))
        first += size
    return places


def _index_in_turn(count: int, sizes: Collection[int], device: torch.device) -> torch.Tensor:
    """Return those places as a tensor, which has no values where the device has none."""
    parts, first = [], 0
    for size in sizes:
        part = torch.arange(first, first + size, device=device).remainder_(count)
        parts.append(part.sort().values)
        first += size
    return torch.cat(parts)


def resize(batch: Batch, *sizes: int) -> Batch:
    """A batch for micro-batches of these sizes, made of this batch's own samples in turn.

    Batched tensors of shape [n, ...] become [sum(sizes), ...]; the rest is the same object.
    """
    size = batch_size(batch)
    if sum(sizes) == size:
        return batch
    chosen: dict[torch.device, torch.Tensor] = {}

    def grow(tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        if device not in chosen:
            chosen[device] = _index_in_turn(size, sizes, device)
        # A leaf again where it was one: a graph that begins before the batch serves one backward
        grown = tensor.detach().index_select(0, chosen[device])
        return grown.requires_grad_(tensor.requires_grad)

    return map_tensors(grow, batch)


def pieces(batch: Batch, sizes: tuple[int, ...], places: Collection[int]) -> Iterator[Batch]:
    """The batch cut into consecutive pieces of those sizes, in order (views, unless sparse).

    `places` says which of `tensors_of(batch)` are cut.
    """

    def cut(tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
        has_views = tensor.layout is torch.strided  # a sparse tensor has none
        return (tensor.narrow if has_views else tensor.narrow_copy)(0, start, length)

    for end, length in zip(accumulate(sizes), sizes, strict=True):
        yield map_batched(partial(cut, start=end - length, length=length), batch, places)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """The batch with `function` applied to each tensor, in the order of `tensors_of`."""
    return _mapped(function, batch, lambda leaf: None)


# Where tensors are counted as on a GPU: `place` makes a copy that counts, and `to` would make none.
_COUNTED = ("cpu", "meta")


def placed(
    batch: Batch, place: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> Batch:
    """The batch on a device.

    Tensors in containers are moved by `place`. An object of another class that has `to(device)` is
    moved by that, except where tensors are counted and it shows its own.
    """

    def moved(leaf: Any) -> Any:
        is_container = _is_record(leaf) or isinstance(leaf, _NO_CONTAINERS)
        if is_container or not callable(getattr(leaf, "to", None)):
            return None
        return None if device.type in _COUNTED and tensors_of(leaf) else leaf.to(device)

    return _mapped(place, batch, moved)


def _mapped(
    function: Callable[[torch.Tensor], torch.Tensor],
    batch: Batch,
    instead: Callable[[Any], Any],
    inside: Mapping[int, Any] = MappingProxyType({}),
) -> Batch:
    """The batch with `function` applied to its tensors.

    Args:
        instead: object that is no tensor -> what takes its place; None: it is opened.
        inside: objects that are being opened, by their ids -> what takes their place.
    """

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if id(leaf) in inside:
            return inside[id(leaf)]
        if (other := instead(leaf)) is not None:
            return other
        parts = _parts(leaf)
        if parts is None or not (_is_record(leaf) or tensors_of(leaf)):
            return leaf
        if isinstance(leaf, Mapping):
            return _made(leaf, _mapped(function, parts, instead, inside))
        # Not made anew, since `__init__` may take other fields or compute some
        changed = copy.copy(leaf)
        mapped = _mapped(function, parts, instead, {**inside, id(leaf): changed})
        for name, value in mapped.items():
            if parts[name] is not value:
                object.__setattr__(changed, name, value)
        return changed

    return pytree.tree_map(visit, batch)


def describe(batch: Batch) -> dict[str, str]:
    """Where each tensor stands in the batch -> its dtype and shape, as text."""
    return {name: shape_words(tensor) for name, tensor in named_tensors(batch)}


def shape_words(tensor: torch.Tensor, *others: list[int]) -> str:
    """Return dtype and shape, as in "int64[4, 64]", or the largest sizes of several shapes."""
    sizes = [max(each) for each in zip(shape_of(tensor), *others, strict=True)]
    return f"{str(tensor.dtype).removeprefix('torch.')}{sizes}"


def shape_in(described: str) -> list[int]:
    """ "int64[4, 64]" -> [4, 64]."""
    shape: list[int] = json.loads(described[described.index("[") :])
    return shape


def shape_of(tensor: torch.Tensor) -> list[int]:
    """Return the shape; of a nested tensor, that of a dense one which would hold its parts."""
    if not tensor.is_nested:
        return list(tensor.shape)
    parts = [part.shape for part in tensor.unbind()]
    return [len(parts), *map(max, zip(*parts, strict=True))]


def map_batched(
    function: Callable[[torch.Tensor], torch.Tensor], batch: Batch, places: Collection[int]
) -> Batch:
    """The batch with `function` applied to the tensors at those places of `tensors_of`."""
    place = -1

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal place
        place += 1
        return function(tensor) if place in places else tensor

    return map_tensors(visit, batch)


def opened(batch: Batch, inside: frozenset[int] = frozenset()) -> Batch:
    """The batch with containers that torch does not know (a tokenizer's output, say) as dicts.

    An object that is met again inside itself, as a child holds its parent, is left out there.
    """

    def visit(leaf: Any) -> Any:
        if id(leaf) in inside:
            return None
        parts = _parts(leaf)
        if parts is None:
            return leaf
        return opened(parts, inside if _is_record(leaf) else inside | {id(leaf)})

    return pytree.tree_map(visit, batch)


# What has attributes and is no container of a batch.
_NO_CONTAINERS = (
    torch.Tensor,
    torch.nn.Module,
    torch.Generator,
    type,
    ModuleType,
    FunctionType,
    MethodType,
    partial,
    weakref.ref,
    enum.Enum,
)


def _is_record(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) or (
        dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    )


def _parts(leaf: Any) -> dict[Any, Any] | None:
    """Return the parts of a mapping, a dataclass or another object by name; None if it has none."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if _is_record(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    if isinstance(leaf, _NO_CONTAINERS) or not hasattr(leaf, "__dict__"):
        return None
    return dict(vars(leaf)) or None


def _made(mapping: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """The same kind of mapping with those parts; a dict where it cannot be made."""
    make: Any = mapping.__class__
    try:
        return make(parts)
    except Exception:  # the class is the user's: what its constructor wants is anybody's guess
        return parts
