"""What a plan's user is warned of: batches of a training that the plan was not found for."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from autofit.errors import InvalidArgument
from autofit.plan import Plan, split_evenly, steps_for
from autofit.training.batch import Batch, describe, named_tensors, shape_of, tensors_of
from autofit.training.samples import MicroBatches, Rows, Samples
from autofit.units import counted

# Numbers of this rank -> those of every rank, by rank.
Gathered: TypeAlias = Callable[..., list[list[float]]]

# The target that torch's losses ignore unless they are told another.
IGNORED = -100
# Samples at random are larger than the mean now and then: so much is no reason to search again.
MOST_ABOVE_THE_MEAN = 1.25
_MOST_LOOKED_INTO = 100  # batches: what is never ignored in those is not looked for in every step


class BatchWatch:
    """Warn of batches that a plan was not found for: once of their size, and once of their shape.

    And once of micro-batches that are weighted by their samples, and ignore unequal shares of them.

    Args:
        plan: the plan that is trained.
        sample_shapes: of the sample batch of the search, as `describe` returns them.
        sample_size: samples of that batch.
        samples: how a step's batch becomes micro-batches.
        weighs_samples: whether micro-batches are weighted by their samples, and the user has not
            allowed that where it differs from the whole batch.
        keeps_split: whether more micro-batches than the plan's would change the gradients.
    """

    def __init__(
        self,
        plan: Plan,
        sample_shapes: Mapping[str, str],
        *,
        sample_size: int | None = None,
        samples: Samples | None = None,
        weighs_samples: bool = False,
        keeps_split: bool = False,
    ) -> None:
        self._plan, self._sample_shapes = plan, sample_shapes
        self._sample_size, self._samples = sample_size, samples
        self._keeps_split = keeps_split
        self._looks_left = _MOST_LOOKED_INTO if weighs_samples else 0
        self._looked: set[tuple[tuple[int, ...], ...]] = set()
        self._warned: set[str] = set()

    def look(
        self, given: Any, samples: int, *, stacklevel: int, gathered: Gathered | None = None
    ) -> None:
        """Warn of this batch, if there is a reason that was not given yet.

        A smaller batch is one only at first: the last of an epoch often is.

        Args:
            given: to a training step; this rank's share of it. Of what no tensors are known yet,
                as of a list of samples, only the number counts.
            samples: that it has.
            stacklevel: of the line that the warning names.
            gathered: numbers of this rank -> those of every rank, each of which looks as often;
                None: this device trains alone.

        Raises:
            InvalidArgument: it would be split into more micro-batches, which changes the gradients;
                or a tensor that stays whole follows its samples.
        """
        steps = steps_for(samples, self._plan.micro_batch)
        meant, whose = self._plan.samples_per_step, "" if gathered is None else " on this rank"
        size = (
            f"a training step got {samples} samples{whose}, but the plan ({self._plan}) takes "
            f"{meant}{self._uneven()}"
        )
        if self._keeps_split and steps > self._plan.accumulation_steps:
            raise InvalidArgument(
                f"{size}: that would be {counted(steps, 'micro-batch')} instead of "
                f"{self._plan.accumulation_steps}, which changes this model's gradients, or the "
                f"search could not compare them. Train on batches of {meant} samples, or search "
                "again with options=SearchOptions(allow_accumulation_change=True)"
            )
        if self._looks_left and (unequal := self._ignored_unequally(given, samples, gathered)):
            self._looks_left = 0
            self._warn("ignored", unequal, stacklevel + 1)
        shapes = tuple(tuple(shape_of(tensor)) for tensor in tensors_of(given))
        if shapes in self._looked:
            return
        if samples > meant or (samples < meant and not self._looked):
            runs = f"the step runs as {counted(steps, 'micro-batch')} and updates on all {samples}"
            reason = "larger" if samples > meant else "smaller"
            self._warn(reason, f"{size}: {runs}", stacklevel + 1)
        if steps > 1 and isinstance(self._samples, Rows):
            self._refuse_growing(given, self._samples)
        is_made = isinstance(given, MicroBatches)
        if longer := self._larger(given) if is_made else self._longer(given, samples):
            self._warn("shape", longer, stacklevel + 1)
        if not (is_made and self._looked):  # each may have shapes of its own
            self._looked.add(shapes)

    def _uneven(self) -> str:
        """Return the plan's sizes where they differ, so that their product is not its samples."""
        sizes = sorted(set(self._plan.micro_batch_sizes), reverse=True)
        return f", in micro-batches of {' and '.join(map(str, sizes))}" if len(sizes) > 1 else ""

    def _ignored_unequally(self, given: Any, samples: int, gathered: Gathered | None) -> str | None:
        sizes = split_evenly(samples, steps_for(samples, self._plan.micro_batch))
        if len(sizes) == 1 and gathered is None:
            return None
        is_first = self._looks_left == _MOST_LOOKED_INTO
        self._looks_left -= 1
        is_made = isinstance(given, MicroBatches)
        found = _valid_of_made(given) if is_made else _ignored_of_rows(given, sizes, is_first)
        name, least, most = max(
            found, key=lambda each: (each[2] - each[1], each[2]), default=("a batch", 0.0, 0.0)
        )
        of_ranks = [(least, most)] if gathered is None else gathered(least, most)
        least, most = min(low for low, _ in of_ranks), max(high for _, high in of_ranks)
        if most - least <= 1e-9:
            return None
        one, another = f"{least:.0%} ignored targets ({IGNORED})", f"{most:.0%}"
        if is_made:
            one, another = f"{least:.4g} targets a sample that are valid", f"{most:.4g}"
        return (
            f"{name} of a training step has {one} in one micro-batch and {another} in "
            f"another{'' if gathered is None else ' of all ranks'}, "
            "so weighting by samples does not give the mean over valid targets. Pass "
            "loss_weight=batch -> number of valid targets to the search or to apply"
        )

    def _refuse_growing(self, batch: Batch, rows: Rows) -> None:
        """Refuse a tensor that every micro-batch would get whole and that is no constant.

        Its dimension 0 is not that of the sample batch, nor a length of samples, as that of
        position ids is.

        Raises:
            InvalidArgument: there is one.
        """
        named = dict(named_tensors(batch))
        lengths = {size for name in rows.batched & named.keys() for size in named[name].shape[1:]}
        for name in sorted(rows.whole & named.keys() & self._sample_shapes.keys()):
            now, before = list(named[name].shape[:1]), _shape_in(self._sample_shapes[name])[:1]
            if now != before and not lengths.intersection(now):
                raise InvalidArgument(
                    f"{name} of a training step is {describe(batch)[name]}, but was "
                    f"{self._sample_shapes[name]} in the sample batch, where it was taken to be "
                    "the same for all samples: it cannot be cut. Search with samples and "
                    "Workload(collate_fn=)"
                )

    def _larger(self, made: MicroBatches) -> str | None:
        if self._sample_size is None:
            return None
        each = zip(made.batches, made.sizes, strict=True)
        told = (self._elements(batch, size, self._sample_size) for batch, size in each)
        now, before = max(told, key=lambda pair: pair[0] - MOST_ABOVE_THE_MEAN * pair[1])
        if now <= MOST_ABOVE_THE_MEAN * before:
            return None
        return (
            f"a micro-batch of a training step has {now:.4g} elements a sample, but the sample "
            f"batch had {before:.4g}: the plan may not fit larger samples, or may not be the "
            "fastest for them. Search again with the largest samples"
        )

    def _elements(self, batch: Batch, size: int, sample_size: int) -> tuple[float, float]:
        """Return the elements a sample of a micro-batch and of the sample batch.

        Without constants, of which fewer samples have more each: what has one shape in both though
        these differ in their samples.
        """
        now = {name: shape_of(tensor) for name, tensor in named_tensors(batch)}
        before = {name: _shape_in(shape) for name, shape in self._sample_shapes.items()}
        constant = {name for name in now if size != sample_size and now[name] == before.get(name)}
        counts = [
            sum(math.prod(shape) for name, shape in shapes.items() if name not in constant)
            for shapes in (now, before)
        ]
        return counts[0] / size, counts[1] / sample_size

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


def _ignored_of_rows(
    batch: Batch, sizes: Sequence[int], is_first: bool
) -> Iterator[tuple[str, float, float]]:
    """Yield names of target tensors, and the least and largest share that a micro-batch ignores."""
    for name, tensor in named_tensors(batch):
        is_of_samples = tensor.dim() >= 2 and tensor.shape[0] == sum(sizes) and tensor.numel()
        if not is_of_samples or tensor.dtype not in (torch.int64, torch.int32):
            continue
        if tensor.layout != torch.strided or not (is_first or tensor.device.type == "cpu"):
            continue  # reading values off a GPU waits for it
        ignored = (tensor == IGNORED).flatten(1).double().mean(1)
        shares = [float(part.mean()) for part in torch.split(ignored, list(sizes))]
        yield name, min(shares), max(shares)


def _valid_of_made(made: MicroBatches) -> Iterator[tuple[str, float, float]]:
    """Yield names of tensors that ignore targets, and how many a sample are valid in each."""
    valid: dict[str, list[float]] = {}
    ignoring: set[str] = set()
    for batch, size in zip(made.batches, made.sizes, strict=True):
        for name, tensor in named_tensors(batch):
            if tensor.dtype not in (torch.int64, torch.int32) or tensor.device.type != "cpu":
                continue
            ignored = tensor == IGNORED
            valid.setdefault(name, []).append(float((~ignored).sum()) / size)
            ignoring |= {name} if bool(ignored.any()) else set()
    yield from ((name, min(valid[name]), max(valid[name])) for name in sorted(ignoring))
