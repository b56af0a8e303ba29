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
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, count
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

_HOST = torch.device("cpu")

ASK_FOR_SAMPLES = (
    "pass samples and Workload(collate_fn=), or a function n -> batch of n samples as the sample "
    "batch"
)


def flattened(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves of a pytree, each with where it stands, and torch's spec."""
    try:
        found, spec = pytree.tree_flatten_with_path(tree, is_leaf)
    except ValueError:  # a container that tells torch its parts, and not their keys
        parts, spec = pytree.tree_flatten(tree, is_leaf)
        found = [((pytree.SequenceKey(at),), part) for at, part in enumerate(parts)]
    return [(pytree.keystr(path), leaf) for path, leaf in found], spec


@dataclass(frozen=True, eq=False)
class FlatBatch:
    """A batch that torch's pytree has flattened, and likewise each object in it that holds tensors.

    Whatever takes a batch here takes this as well, and does not flatten it again.

    Attributes:
        leaves: where each stands, and a tensor, a flat object, or what holds no tensor.
        spec: torch's, of which the batch is made again.
        owner: the object of which these are the parts; None: they are those of the batch.
        batch: as it was given; None: it is to be made again of these leaves.
    """

    leaves: tuple[tuple[str, Any], ...]
    spec: Any
    owner: Any = None
    batch: Batch = None

    @classmethod
    def of(cls, batch: Batch) -> FlatBatch:
        """Flatten a batch.

        Raises:
            InvalidArgument: the batch holds itself, or is nested too deeply.
        """
        if isinstance(batch, FlatBatch):
            return batch
        try:
            return replace(cls._of(batch, None, frozenset()), batch=batch)
        except RecursionError as error:
            raise InvalidArgument(
                f"the batch ({kind_of(batch)}) holds itself, or is nested too deeply: give one "
                "whose tensors lie in a few nested lists, mappings or dataclasses"
            ) from error

    @classmethod
    def _of(cls, tree: Any, owner: Any, inside: frozenset[int]) -> FlatBatch:
        """Flatten parts of an owner; an object inside itself is not expanded again."""

        def opened(leaf: Any) -> Any:
            parts = None if isinstance(leaf, FlatBatch) or id(leaf) in inside else parts_of(leaf)
            if parts is None:
                return leaf
            flat = cls._of(parts, leaf, inside if _is_record(leaf) else inside | {id(leaf)})
            return flat if _is_record(leaf) or flat.named else leaf

        found, spec = flattened(tree)
        return cls(tuple((name, opened(leaf)) for name, leaf in found), spec, owner)

    @cached_property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Where each tensor stands, and the tensor, in the pytree's order."""
        found: list[tuple[str, torch.Tensor]] = []
        for name, leaf in self.leaves:
            if isinstance(leaf, FlatBatch):
                found += [(name + inner, tensor) for inner, tensor in leaf.named]
            elif isinstance(leaf, torch.Tensor):
                found.append((name, leaf))
        return found

    def mapped(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        instead: Callable[[Any, bool], Any] = lambda leaf, shows: None,
    ) -> FlatBatch:
        """Return it with `function` applied to each tensor, in their order.

        Args:
            function: of a tensor.
            instead: object that is no tensor, and whether it shows any -> what takes its place;
                None: it is opened.
        """

        def change(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return function(leaf)
            if not isinstance(leaf, FlatBatch):
                other = instead(leaf, False)
                return leaf if other is None else other
            other = instead(leaf.owner, bool(leaf.named))
            return leaf.mapped(function, instead) if other is None else other

        leaves = tuple((name, change(leaf)) for name, leaf in self.leaves)
        return FlatBatch(leaves, self.spec, self.owner)

    def whole(self, inside: Mapping[int, Any] = MappingProxyType({})) -> Batch:
        """Return the batch.

        Args:
            inside: objects that are being made, by the ids of those they are made of.
        """

        def parts(inside: Mapping[int, Any]) -> Any:
            values = (
                leaf.whole(inside)
                if isinstance(leaf, FlatBatch) and leaf.owner is not None
                else inside.get(id(leaf), leaf)
                for _, leaf in self.leaves
            )
            return pytree.tree_unflatten(values, self.spec)

        if self.owner is None:
            return parts(inside) if self.batch is None else self.batch
        if isinstance(self.owner, Mapping):
            return _made(self.owner, parts(inside))
        # Not made anew, since `__init__` may take other fields or compute some
        before, changed = parts_of(self.owner) or {}, copy.copy(self.owner)
        for name, value in parts({**inside, id(self.owner): changed}).items():
            if before[name] is not value:
                object.__setattr__(changed, name, value)
        return changed


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Every tensor in the batch, in the pytree's order; raises as `FlatBatch.of`."""
    return [tensor for _, tensor in FlatBatch.of(batch).named]


def _given(batch: Batch) -> Any:
    return batch.batch if isinstance(batch, FlatBatch) else batch


def batch_size(batch: Batch) -> int:
    """The number of samples in the batch.

    Raises:
        InvalidArgument: the batch has no tensor with dimensions, or no samples.
    """
    sized = [tensor for tensor in tensors_of(batch) if tensor.dim() > 0]
    if not sized:
        raise InvalidArgument(
            f"the sample batch ({kind_of(_given(batch))}) has no tensor with a dimension for "
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
    return [(name or "batch", tensor) for name, tensor in FlatBatch.of(batch).named]


def places_in_turn(
    count: int, sizes: Collection[int], device: torch.device = _HOST
) -> torch.Tensor:
    """Return which of this many samples stand in micro-batches of those sizes, one after the other.

    They are taken in turn. In a micro-batch they keep their order, and a sample that is repeated
    stands next to itself: so lengths that are sorted stay sorted. On a device without values they
    have none.
    """
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
            chosen[device] = places_in_turn(size, sizes, device)
        # A leaf again where it was one: a graph that begins before the batch serves one backward
        grown = tensor.detach().index_select(0, chosen[device])
        return grown.requires_grad_(tensor.requires_grad)

    return map_tensors(grow, batch)


def pieces(batch: Batch, sizes: tuple[int, ...], places: Collection[int]) -> Iterator[Batch]:
    """The batch cut into consecutive pieces of those sizes, in order (views, unless sparse).

    Those of a flat batch are flat. `places` says which of `tensors_of(batch)` are cut.
    """

    def cut(tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
        has_views = tensor.layout is torch.strided  # a sparse tensor has none
        return (tensor.narrow if has_views else tensor.narrow_copy)(0, start, length)

    flat = FlatBatch.of(batch)
    for end, length in zip(accumulate(sizes), sizes, strict=True):
        piece = _mapped_at(partial(cut, start=end - length, length=length), flat, places)
        yield piece if batch is flat else piece.whole()


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """The batch with `function` applied to each tensor, in the order of `tensors_of`."""
    return FlatBatch.of(batch).mapped(function).whole()


# Where tensors are counted as on a GPU: `place` makes a copy that counts, and `to` would make none.
_COUNTED = ("cpu", "meta")


def placed(
    batch: Batch, place: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> Batch:
    """The batch on a device.

    Tensors in containers are moved by `place`. An object of another class that has `to(device)` is
    moved by that, except where tensors are counted and it shows its own.
    """

    def moved(leaf: Any, shows_tensors: bool) -> Any:
        is_container = _is_record(leaf) or isinstance(leaf, _NO_CONTAINERS)
        is_counted = device.type in _COUNTED and shows_tensors
        if is_container or is_counted or not callable(getattr(leaf, "to", None)):
            return None
        return leaf.to(device)

    return FlatBatch.of(batch).mapped(place, moved).whole()


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
    return _mapped_at(function, FlatBatch.of(batch), places).whole()


def _mapped_at(
    function: Callable[[torch.Tensor], torch.Tensor], flat: FlatBatch, places: Collection[int]
) -> FlatBatch:
    place = count()
    return flat.mapped(lambda tensor: function(tensor) if next(place) in places else tensor)


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


def parts_of(leaf: Any) -> dict[Any, Any] | None:
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
    for make in (mapping.__class__, partial(_copied_with, mapping)):
        try:
            made: Any = make(parts)  # type: ignore[call-arg]  # the class is the user's
        except Exception:  # what its constructor wants is anybody's guess
            continue
        if set(made) == set(parts):
            return made
    return parts


def _copied_with(mapping: Any, parts: dict[Any, Any]) -> Any:
    copied = copy.copy(mapping)
    for name, part in parts.items():
        copied[name] = part
    return copied
