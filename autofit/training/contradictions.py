"""Whether a batch of tensors bears out the number of samples that was taken from it.

The rule of `autofit.training.batch` takes dimension 0 of the first tensor for the samples, n. These
contradict it, so the batch is refused:

1. entries of a list that are alike (mappings, or tensors of one type), and disagree in dimension 0
   or, as images do that have their channels there, in the rest of their shapes, or are as many as
   another tensor has rows; or mappings that hold numbers, as a sample holds its target;
2. a list of mappings, or a tensor named as a target is (y, label, target), without n in
   dimension 0;
3. an index: integers, or a first column of them, that count 0, 0, 1, ... up to m - 1, where another
   tensor has m rows, or n is m: graphs, point clouds, boxes of images, sets;
4. a sum: integers whose sum is the size of dimension 0 of another tensor: concatenated targets;
5. two candidates: nothing but the first tensor has n, and others agree on another number, or the
   first is a vector beside a table of other rows, or another has the size of its dimension 1 (time
   first) without counting its places, as position ids do;
6. token ids in several tensors, one of which has a multiple of n;
7. with a criterion, a target without n in dimension 0, nor 1, which may stand for all;
8. one sample, where only some of the other tensors have 1 in dimension 0; or a tensor with a layout
   that torch cannot pick samples out of.

A size that is explained by a length of a sample (the positions of token ids), or a square mask, is
none of these. A floating-point tensor that stays whole without such an explanation is no
contradiction, but doubtful: class weights stay whole, nodes of a graph do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autofit.errors import InvalidArgument
from autofit.training.batch import (
    ASK_FOR_SAMPLES,
    Batch,
    batch_size,
    flattened,
    named_tensors,
    parts_of,
    shape_words,
    tensors_of,
)

_TARGETS = ("y", "label", "labels", "target", "targets")
# Channels of an image, where the list of images is cut by them.
_CHANNELS = (1, 3, 4)
# Values that are read off a tensor; a longer one is not looked into.
_MAX_READ = 10_000_000


def check_rows(batch: Batch, *, has_criterion: bool = False) -> None:
    """Refuse a sample batch whose samples cannot be told apart, or not as the rule does.

    Args:
        batch: of tensors.
        has_criterion: whether it is (input, target).

    Raises:
        InvalidArgument: a tensor has a layout that torch cannot pick samples out of; the rule finds
            no samples; or one of the contradictions above.
    """
    facts = _Facts(batch, has_criterion)
    for rule in _RULES:
        for found in rule(facts):
            raise InvalidArgument(
                f"the sample batch cannot be cut into samples: {found}; {ASK_FOR_SAMPLES}"
            )


def doubtful(batch: Batch) -> list[str]:
    """Return the names of floating-point tensors that stay whole for no apparent reason."""
    facts = _Facts(batch)
    has_time_first = len(facts.batched) == 1 and facts.first.dim() > 1

    def is_doubtful(tensor: torch.Tensor) -> bool:
        may_be_target = has_time_first and tensor.shape == facts.first.shape[1:2]
        is_constant = facts.agrees(tensor) and not may_be_target
        return tensor.is_floating_point() and not is_constant

    return [name for name, tensor in facts.whole.items() if is_doubtful(tensor)]


def uncut(batch: Batch) -> list[str]:
    """Return the names of non-tensors with an entry for each sample, which stay whole."""
    samples = batch_size(batch)

    def is_per_sample(part: Any) -> bool:
        if isinstance(part, list | tuple):
            return len(part) == samples and not tensors_of(part)
        is_array = not isinstance(part, torch.Tensor)
        return is_array and tuple(getattr(part, "shape", ()))[:1] == (samples,)

    parts = _parts_in(batch, is_per_sample) if samples > 1 else ()
    return [name for name, part in parts if is_per_sample(part)]


def is_square(tensor: torch.Tensor) -> bool:
    """Return whether it may be a mask over the positions of a sample."""
    return tensor.dim() >= 2 and tensor.shape[0] == tensor.shape[1]


@dataclass(frozen=True)
class _Facts:
    """A batch, whose tensors with dimensions are looked at by name."""

    batch: Batch
    has_criterion: bool = False

    @cached_property
    def samples(self) -> int:
        return batch_size(self.batch)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those with dimensions, in order; the first is what the rule goes by."""
        return {name: t for name, t in named_tensors(self.batch) if t.dim() > 0}

    @cached_property
    def batched(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in self.tensors.items() if t.shape[0] == self.samples}

    @cached_property
    def whole(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in self.tensors.items() if t.shape[0] != self.samples}

    @property
    def first(self) -> torch.Tensor:
        return next(iter(self.tensors.values()))

    @cached_property
    def lengths(self) -> set[int]:
        """The sizes of samples: position ids, rotations and masks have one in dimension 0."""
        return {size for tensor in self.batched.values() for size in tensor.shape[1:]}

    def explains(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that stays whole is of one of a sample's own lengths."""
        return tensor.shape[0] in self.lengths or is_square(tensor)

    def agrees(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor may lie beside this many samples."""
        return tensor.shape[0] in (1, self.samples) or self.explains(tensor)

    def text(self, *names: str) -> str:
        """Return those tensors with their shapes."""
        return ", ".join(f"{name} {shape_words(self.tensors[name])}" for name in names)

    @property
    def source(self) -> str:
        name = next(iter(self.tensors))
        return f"{self.samples} samples were taken from {self.text(name)}"


def _layouts(facts: _Facts) -> Iterator[str]:
    for tensor in tensors_of(facts.batch):
        if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            yield f"torch selects samples from dense and sparse_coo tensors, not from {kind} ones"


def _one_sample(facts: _Facts) -> Iterator[str]:
    count, ones = len(facts.tensors), len(facts.batched)
    if facts.samples == 1 and 1 < ones < count:
        yield (
            f"{ones} of its {count} tensors have size 1 in dimension 0, so it is ambiguous which "
            "of them hold the one sample; in a batch of two or more it is not"
        )


def _other_target(facts: _Facts) -> Iterator[str]:
    """Dimension 0 of a target is the samples, or 1, which may stand for all, in some tensor."""
    if facts.has_criterion and isinstance(facts.batch, tuple | list) and len(facts.batch) == 2:
        sizes = [tensor.shape[0] for tensor in tensors_of(facts.batch[1]) if tensor.dim() > 0]
        if sizes and not {facts.samples, 1} & set(sizes):
            yield (
                "with criterion= the batch is (input, target), but dimension 0 is "
                f"{facts.samples} in the input and {sizes[0]} in the target"
            )


def _lists(facts: _Facts) -> Iterator[str]:
    """Entries of a list that are alike are its samples, unless each has n rows."""
    for name, entries in (("the batch", facts.batch), *_parts_in(facts.batch)):
        if not isinstance(entries, list | tuple) or len(entries) < 2:
            continue
        if _are_mappings(entries):
            tensors = [t for entry in entries for _, t in named_tensors(entry)]
            has_numbers = any(t.dim() == 0 for t in tensors)  # such as one target a sample
            if has_numbers or not all(map(facts.agrees, tensors)):
                yield f"{name} is a list of {len(entries)} mappings, but {facts.source}"
        elif _are_tensors(entries):
            shapes = {tuple(entry.shape) for entry in entries}
            are_images = entries[0].dim() == 3 and facts.samples in _CHANNELS
            if not all(map(facts.agrees, entries)) and not _is_pair_of_tables(entries):
                yield f"{name} is a list of {len(entries)} tensors {_words(shapes)}"
            elif are_images and len(shapes) > 1 and len(entries) > 2:
                yield (
                    f"{name} is a list of {len(entries)} tensors {_words(shapes)}, like "
                    f"images, whose {facts.samples} channels would be cut"
                )
            for beside in _rows_of_entries(facts, len(entries)):
                yield (
                    f"{name} is a list of {len(entries)} tensors, as many as "
                    f"{facts.text(beside)} has rows, but {facts.source}"
                )


def _rows_of_entries(facts: _Facts, count: int) -> Iterator[str]:
    """Yield what has one row for each of this many entries; two may be weights of two views."""
    for name, tensor in facts.whole.items():
        is_row_of_each = tensor.shape[0] == count and not facts.explains(tensor)
        if is_row_of_each and (count > 2 or not tensor.is_floating_point()):
            yield name


def _words(shapes: Collection[tuple[int, ...]]) -> str:
    shown = ", ".join(str(list(shape)) for shape in sorted(shapes)[:3])
    return f"of shapes {shown}{' and others' * (len(shapes) > 3)}"


def _are_mappings(entries: Sequence[Any]) -> bool:
    """Return whether the entries are mappings with the same keys."""
    return all(isinstance(entry, Mapping) for entry in entries) and all(
        entry.keys() == entries[0].keys() for entry in entries
    )


def _are_tensors(entries: Sequence[Any]) -> bool:
    """Return whether the entries are tensors of one type, with as many dimensions."""
    if not all(isinstance(entry, torch.Tensor) and entry.dim() > 0 for entry in entries):
        return False
    return len({(entry.dtype, entry.dim()) for entry in entries}) == 1


def _is_pair_of_tables(entries: Sequence[torch.Tensor]) -> bool:
    """Return whether a tensor may be an input beside another table, such as class prototypes."""
    return len(entries) == 2 and entries[0].is_floating_point() and entries[0].dim() <= 2


def _targets(facts: _Facts) -> Iterator[str]:
    for name, tensor in facts.whole.items():
        if _is_target(name) and tensor.shape[0] > 1:
            yield f"{facts.text(name)} is named like a target, but {facts.source}"


def _is_target(name: str) -> bool:
    """Return whether a tensor is named as a target: y, labels, class_labels."""
    key = name.rpartition("['")[2].removesuffix("']").lower()
    return key in _TARGETS or key.endswith(tuple(f"_{each}" for each in _TARGETS))


def _indices(facts: _Facts) -> Iterator[str]:
    sizes = {name: tensor.shape[0] for name, tensor in facts.tensors.items()}
    for name, tensor in facts.tensors.items():
        counted = _count_of_index(_first_column(tensor))
        if counted is None or not 1 < counted < tensor.shape[0] or _is_target(name):
            continue
        for other, size in sizes.items():
            if size == counted and facts.samples in (size, tensor.shape[0]):
                yield (
                    f"{facts.text(name)} counts to {counted}, like an index of samples, and "
                    f"{facts.text(other)} has {counted} rows"
                )


def _first_column(tensor: torch.Tensor) -> torch.Tensor:
    """Return a vector as it is, and of a table the first column, as integers if all of it are."""
    if tensor.dim() != 2 or tensor.shape[1] < 2 or not _may_be_read(tensor):
        return tensor
    column = tensor.detach()[:_MAX_READ, 0]
    return column.long() if torch.equal(column, column.long().to(column.dtype)) else column


def _may_be_read(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_complex()


def _count_of_index(tensor: torch.Tensor) -> int | None:
    """Return m where the integers are 0, 0, 1, ... m - 1 in order, none of them left out."""
    values = _integers(tensor)
    if values is None or len(values) < 2:
        return None
    steps = values.diff()
    if int(values[0]) or int(steps.min()) < 0 or int(steps.max()) > 1:
        return None
    return int(values[-1]) + 1


def _integers(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of one dimension of integers.

    None if it is something else, or has none.
    """
    if not _may_be_read(tensor) or tensor.dim() != 1 or not 0 < tensor.numel() <= _MAX_READ:
        return None
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return None
    return tensor.detach().cpu().long()


def _sums(facts: _Facts) -> Iterator[str]:
    for name, tensor in facts.tensors.items():
        values = _integers(tensor)
        if values is None or len(values) < 2 or int(values.min()) < 0:
            continue
        total = int(values.sum())
        for other, summed in facts.tensors.items():
            is_explained = summed.shape[0] != facts.samples and facts.explains(summed)
            if summed.shape[0] == total > len(values) and not is_explained:
                yield (
                    f"{facts.text(other)} has {total} rows, which is the sum of "
                    f"{facts.text(name)}, as if samples of several lengths were concatenated"
                )


def _candidates(facts: _Facts) -> Iterator[str]:
    if len(facts.batched) > 1:
        return
    doubted = {n: t for n, t in facts.whole.items() if t.shape[0] > 1 and not is_square(t)}
    agreeing: dict[int, list[str]] = {}
    for name, tensor in doubted.items():
        agreeing.setdefault(tensor.shape[0], []).append(name)
    for size, names in agreeing.items():
        if len(names) > 1 and size not in facts.lengths:
            yield f"{facts.text(*names[:3])} agree on {size} in dimension 0, but {facts.source}"
    if facts.first.dim() < 2:
        tables = [n for n, t in doubted.items() if t.is_floating_point() and t.dim() > 1]
        if tables:
            yield f"{facts.text(*tables[:3])} is the only input, but {facts.source}"
        return
    for name, tensor in doubted.items():
        values = _integers(tensor)
        is_positions = values is not None and bool((values.diff() == 1).all())
        if values is not None and tensor.shape[0] == facts.first.shape[1] and not is_positions:
            yield (
                f"{facts.text(name)} has the size of dimension 1 of the first tensor, as if "
                f"dimension 0 were time, but {facts.source}"
            )


def _token_ids(facts: _Facts) -> Iterator[str]:
    def is_of_ids(tensor: torch.Tensor) -> bool:
        return tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32)

    if not any(map(is_of_ids, facts.batched.values())):
        return
    for name, tensor in facts.whole.items():
        size = tensor.shape[0]
        is_multiple = size > 1 and 0 in (size % facts.samples, facts.samples % size)
        if is_of_ids(tensor) and is_multiple and not facts.explains(tensor):
            yield f"{facts.text(name)} has {size} rows of token ids, but {facts.source}"


def _parts_in(
    part: Any,
    is_whole: Callable[[Any], bool] = lambda part: False,
    name: str = "",
    inside: frozenset[int] = frozenset(),
) -> Iterator[tuple[str, Any]]:
    """Yield each part of a batch with where it stands, the outermost first.

    Args:
        part: a batch, or a part of it, which is not yielded itself.
        is_whole: a part that is not opened.
        name: where it stands.
        inside: what it lies in, by ids: an object that is met again there is not opened.
    """
    if isinstance(part, torch.Tensor) or id(part) in inside:
        return
    for key, each in _opened(part):
        yield name + key, each
        if not is_whole(each):
            yield from _parts_in(each, is_whole, name + key, inside | {id(part)})


def _opened(part: Any) -> list[tuple[str, Any]]:
    """Return what lies directly in a part, named as in a flat batch."""
    found, _ = flattened(part, lambda each: each is not part)
    if not any(each is part for _, each in found):
        return found
    parts = dict(enumerate(part)) if isinstance(part, list | tuple) else parts_of(part) or {}
    return [(f"[{key!r}]", each) for key, each in parts.items()]


_RULES = (
    _layouts,
    _one_sample,
    _other_target,
    _lists,
    _targets,
    _indices,
    _sums,
    _candidates,
    _token_ids,
)
