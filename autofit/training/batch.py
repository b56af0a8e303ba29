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
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from autofit.errors import InvalidArgument
from autofit.plan import Plan, split_evenly, steps_for
from autofit.torch_private import pytree
from autofit.units import counted, kind_of

# Any pytree of tensors: a tensor, a tuple, a mapping, a dataclass, or these nested.
Batch: TypeAlias = Any

# Numbers of this rank -> those of every rank, by rank.
Gathered: TypeAlias = Callable[..., list[list[float]]]

# n -> a batch of n samples.
BatchMaker: TypeAlias = Callable[[int], Batch]

_CAN_BE_CUT = (torch.strided, torch.sparse_coo)
_ASK_FOR_MAKER = "pass a function n -> batch of n samples as the sample batch instead"


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Every tensor in the batch, in the pytree's order.

    Raises:
        InvalidArgument: the batch holds itself, or is nested too deeply.
    """
    try:
        leaves = pytree.tree_leaves(_opened(batch))
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
            f"samples: {_ASK_FOR_MAKER}"
        )
    if sized[0].shape[0] == 0:
        raise InvalidArgument("the sample batch is empty: its first tensor has 0 samples")
    return sized[0].shape[0]


def check_batched_dimension(batch: Batch) -> None:
    """Refuse a sample batch whose samples the rule cannot tell apart.

    Raises:
        InvalidArgument: it has one sample, and of the tensors beside the first some have size 1 in
            dimension 0 and some have not; or a tensor has a layout that torch cannot pick samples
            out of.
    """
    for tensor in tensors_of(batch):
        if tensor.is_nested or tensor.layout not in _CAN_BE_CUT:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise InvalidArgument(
                f"the sample batch has a {kind} tensor, from which torch cannot select "
                f"samples: pass a dense or sparse_coo tensor, or {_ASK_FOR_MAKER}"
            )
    sizes = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim() > 0]
    if batch_size(batch) == 1 and 1 < sizes.count(1) < len(sizes):
        raise InvalidArgument(
            f"the sample batch has one sample, and {sizes.count(1)} of its "
            f"{len(sizes)} tensors have size 1 in dimension 0, so it is ambiguous "
            "which of them hold samples: pass a batch of two or more samples, or "
            f"{_ASK_FOR_MAKER}"
        )


def check_target(batch: Batch) -> None:
    """Refuse an (input, target) whose target has another number of samples.

    Raises:
        InvalidArgument: of the tensors of the target that have dimensions none has the batch's
            samples in dimension 0, nor one sample, which may stand for all.
    """
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        return  # the loss says what it wants
    samples = batch_size(batch)
    sizes = [tensor.shape[0] for tensor in tensors_of(batch[1]) if tensor.dim() > 0]
    if sizes and not {samples, 1} & set(sizes):
        raise InvalidArgument(
            "with criterion= the batch is (input, target), but dimension 0 is "
            f"{samples} in the input and {sizes[0]} in the target, so they cannot be "
            f"split together: pass one target for each sample, or {_ASK_FOR_MAKER}"
        )


@dataclasses.dataclass(frozen=True)
class Samples:
    """Which tensors of a training's batches hold samples, by their names in `describe`.

    Attributes:
        batched: names of the tensors with a sample in each place of dimension 0.
        whole: names of the others, which every micro-batch gets as they are.
    """

    batched: frozenset[str]
    whole: frozenset[str]

    @classmethod
    def of(cls, batch: Batch) -> Samples:
        """Find them by the rule."""
        return cls._with(batch, batch_size(batch))

    @classmethod
    def _with(cls, batch: Batch, size: int) -> Samples:
        named = _named(batch)
        batched = frozenset(name for name, t in named if t.dim() > 0 and t.shape[0] == size)
        return cls(batched, frozenset(name for name, _ in named) - batched)

    @classmethod
    def made_by(cls, maker: BatchMaker) -> Samples:
        """Tell them by two batches: what holds samples has as many of them as were asked for.

        One batch alone may have a constant tensor of just its size.
        """
        fewer, more = (cls._with(maker(samples), samples) for samples in (2, 3))
        batched = fewer.batched & more.batched
        return cls(batched, (fewer.batched | fewer.whole | more.batched | more.whole) - batched)

    def places(self, batch: Batch) -> frozenset[int]:
        """Return which of `tensors_of(batch)` hold samples; `size` has checked them."""
        return frozenset(i for i, (name, _) in enumerate(_named(batch)) if name in self.batched)

    def size(self, batch: Batch) -> int:
        """Return the number of samples in the batch.

        Raises:
            InvalidArgument: the batch has a tensor that the sample batch lacked, no tensor of it
                holds samples, or those that do have none or unequal numbers of them.
        """
        named = _named(batch)
        if strangers := {name for name, _ in named} - self.batched - self.whole:
            raise InvalidArgument(
                f"the batch has {', '.join(sorted(strangers))}, which the sample batch did "
                "not have, so it is unknown whether it holds samples: train on batches "
                "with the tensors of the sample batch "
                f"({', '.join(sorted(self.batched | self.whole))}), "
                "or search again with such a batch"
            )
        sizes = {name: tuple(t.shape[:1]) for name, t in named if name in self.batched}
        if len(set(sizes.values())) != 1 or () in sizes.values():
            told = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise InvalidArgument(
                "the tensors that hold samples must agree in dimension 0, but this batch "
                f"has {told or 'none'}"
            )
        (samples,) = next(iter(sizes.values()))
        if samples == 0:
            raise InvalidArgument("the batch is empty: its tensors have 0 samples; leave it out")
        return samples


def _named(batch: Batch) -> list[tuple[str, torch.Tensor]]:
    """Where each tensor stands in the batch, and the tensor, in the order of `tensors_of`."""
    leaves, _ = pytree.tree_flatten_with_path(_opened(batch))
    return [
        (pytree.keystr(path) or "batch", leaf)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]


def resize(batch: Batch, samples: int) -> Batch:
    """A batch of `samples` samples, made of this batch's own in turn.

    Batched tensors of shape [n, ...] become [samples, ...]; the rest is the same object.
    """
    size = batch_size(batch)
    if samples == size:
        return batch

    def grow(tensor: torch.Tensor) -> torch.Tensor:
        index = torch.arange(samples, device=tensor.device).remainder_(size)
        # A leaf again where it was one: a graph that begins before the batch serves one backward
        grown = tensor.detach().index_select(0, index)
        return grown.requires_grad_(tensor.requires_grad)

    return map_batched(grow, batch, Samples.of(batch).places(batch))


def pieces(batch: Batch, sizes: tuple[int, ...], places: Collection[int]) -> Iterator[Batch]:
    """The batch cut into consecutive pieces of those sizes, in order (views, unless sparse).

    `places` says which of `tensors_of(batch)` are cut.
    """
    start = 0
    for length in sizes:
        yield map_batched(_cut(start, length), batch, places)
        start += length


def _cut(start: int, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            return tensor[start : start + length]
        return tensor.narrow_copy(0, start, length)  # a sparse tensor has no views

    return cut


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """The batch with `function` applied to each tensor, in the order of `tensors_of`."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        parts = _parts(leaf)
        return leaf if parts is None else _rebuilt(leaf, map_tensors(function, parts))

    return pytree.tree_map(visit, batch)


def describe(batch: Batch) -> dict[str, str]:
    """Where each tensor stands in the batch -> its dtype and shape, as text."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for name, tensor in _named(batch)
    }


# The target that torch's losses ignore unless they are told another.
IGNORED = -100
_MOST_LOOKED_INTO = 100  # batches: what is never ignored in those is not looked for in every step


class BatchWatch:
    """Warn of batches that a plan was not found for: once of their size, and once of their shape.

    And once of micro-batches that are weighted by their samples, and ignore unequal shares of them.

    Args:
        plan: the plan that is trained.
        sample_shapes: of the sample batch of the search, as `describe` returns them.
        weighs_samples: whether micro-batches are weighted by their samples, and the user has not
            allowed that where it differs from the whole batch.
        keeps_split: whether more micro-batches than the plan's would change the gradients.
    """

    def __init__(
        self,
        plan: Plan,
        sample_shapes: Mapping[str, str],
        *,
        weighs_samples: bool = False,
        keeps_split: bool = False,
    ) -> None:
        self._plan, self._sample_shapes = plan, sample_shapes
        self._keeps_split = keeps_split
        self._looks_left = _MOST_LOOKED_INTO if weighs_samples else 0
        self._looked: set[tuple[torch.Size, ...]] = set()
        self._warned: set[str] = set()

    def look(
        self, batch: Batch, samples: int, *, stacklevel: int, gathered: Gathered | None = None
    ) -> None:
        """Warn of this batch, if there is a reason that was not given yet.

        A smaller batch is one only at first: the last of an epoch often is.

        Args:
            batch: of a training step; this rank's share of it.
            samples: that it has.
            stacklevel: of the line that the warning names.
            gathered: numbers of this rank -> those of every rank, each of which looks as often;
                None: this device trains alone.

        Raises:
            InvalidArgument: it would be split into more micro-batches, which changes the gradients.
        """
        steps = steps_for(samples, self._plan.micro_batch)
        if self._keeps_split and steps > self._plan.accumulation_steps:
            raise InvalidArgument(
                f"{self._about_size(samples)}; the search did not split batches, because "
                "that changes this model's gradients or could not be compared: train on "
                "batches of that size, or search again with allow_accumulation_change=True"
            )
        if self._looks_left and (unequal := self._ignored_unequally(batch, samples, gathered)):
            self._looks_left = 0
            self._warn("ignored", unequal, stacklevel + 1)
        shapes = tuple(tensor.shape for tensor in tensors_of(batch))
        if shapes in self._looked:
            return
        meant = self._plan.samples_per_step
        if samples > meant or (samples < meant and not self._looked):
            self._warn("size", self._about_size(samples), stacklevel + 1)
        if longer := self._longer(batch, samples):
            self._warn("shape", longer, stacklevel + 1)
        self._looked.add(shapes)

    def _about_size(self, samples: int) -> str:
        plan = self._plan
        steps, meant = steps_for(samples, plan.micro_batch), plan.samples_per_step
        return (
            f"a training step got {samples} samples, but the plan ({plan}) has {meant}: "
            f"it runs as {counted(steps, 'micro-batch')}, with a global batch of "
            f"{samples} instead of {meant}"
        )

    def _ignored_unequally(
        self, batch: Batch, samples: int, gathered: Gathered | None
    ) -> str | None:
        sizes = split_evenly(samples, steps_for(samples, self._plan.micro_batch))
        if len(sizes) == 1 and gathered is None:
            return None
        is_first = self._looks_left == _MOST_LOOKED_INTO
        self._looks_left -= 1
        name, shares = "a batch", (0.0, 0.0)
        for place, tensor in enumerate(tensors_of(batch)):
            is_of_samples = tensor.dim() >= 2 and tensor.shape[0] == samples and tensor.numel()
            if not is_of_samples or tensor.dtype not in (torch.int64, torch.int32):
                continue
            if tensor.layout != torch.strided or not (is_first or tensor.device.type == "cpu"):
                continue  # reading values off a GPU waits for it
            ignored = (tensor == IGNORED).flatten(1).double().mean(1)
            found = [float(part.mean()) for part in torch.split(ignored, list(sizes))]
            if (max(found) - min(found), max(found)) > (shares[1] - shares[0], shares[1]):
                name, shares = list(describe(batch))[place], (min(found), max(found))
        of_ranks = [shares] if gathered is None else gathered(*shares)
        least, most = min(low for low, _ in of_ranks), max(high for _, high in of_ranks)
        if most - least <= 1e-9:
            return None
        return (
            f"{name} of a training step has {least:.0%} ignored targets ({IGNORED}) in "
            f"one micro-batch and {most:.0%} in "
            f"another{'' if gathered is None else ' of all ranks'}, "
            "so weighting by samples does not give the mean over valid targets. Pass "
            "loss_weight=batch -> number of valid targets to the search or to apply"
        )

    def _longer(self, batch: Batch, samples: int) -> str | None:
        for name, now in describe(batch).items():
            sample = self._sample_shapes.get(name)
            if sample is None:
                continue
            ours, theirs = _shape_in(now), _shape_in(sample)
            first = 1 if ours[:1] == [samples] else 0
            if len(ours) == len(theirs) and any(
                one > other for one, other in zip(ours[first:], theirs[first:], strict=True)
            ):
                return (
                    f"{name} of a training step is {now}, but was {sample} in the sample "
                    "batch: the plan may not fit longer samples, or may not be the fastest "
                    "for them. Search again with the longest samples"
                )
        return None

    def _warn(self, reason: str, text: str, stacklevel: int) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(text, stacklevel=stacklevel + 1)


def _shape_in(described: str) -> list[int]:
    """ "int64[4, 64]" -> [4, 64]."""
    shape: list[int] = json.loads(described[described.index("[") :])
    return shape


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


def _opened(batch: Batch) -> Batch:
    """The batch with containers that torch does not know (a tokenizer's output, say) as dicts."""

    def visit(leaf: Any) -> Any:
        parts = _parts(leaf)
        return leaf if parts is None else _opened(parts)

    return pytree.tree_map(visit, batch)


def _parts(leaf: Any) -> dict[Any, Any] | None:
    """Return the fields of a mapping or dataclass by name; None if it is neither."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _rebuilt(leaf: Any, parts: dict[Any, Any]) -> Any:
    """The same kind of mapping or dataclass with those parts; a dict where it cannot be made."""
    try:
        if not isinstance(leaf, Mapping):
            # Not made anew, since `__init__` may take other fields or compute some
            changed = copy.copy(leaf)
            for name, value in parts.items():
                object.__setattr__(changed, name, value)
            return changed
        make: Any = leaf.__class__
        return make(parts)
    except Exception:  # the class is the user's: what its constructor wants is anybody's guess
        return parts
