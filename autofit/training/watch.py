"""What a plan's user is warned of: batches of a training that the plan was not found for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias

import torch

from autofit.errors import InvalidArgument
from autofit.plan import Plan, steps_for
from autofit.training.batch import named_tensors, shape_in, shape_of, shape_words
from autofit.training.samples import MicroBatches, Rows, Samples
from autofit.units import counted

# Numbers of this rank -> those of every rank, by rank.
Gathered: TypeAlias = Callable[..., list[list[float]]]

# The target that torch's losses ignore unless they are told another.
IGNORED = -100
# Samples at random are larger than the mean now and then: so much is no reason to search again.
MAX_ABOVE_THE_MEAN = 1.25
_MAX_LOOKS = 100  # batches: what is never ignored in those is not looked for in every step


class BatchWatch:
    """Warn of batches that a plan was not found for: once of their size, and once of their shape.

    And once of micro-batches that are weighted by their samples, and ignore unequal shares of them.

    Args:
        plan: the plan that is trained.
        sample_shapes: of the sample batch of the search, as `describe` returns them.
        micro_batch_shapes: likewise, of the largest micro-batch of the plan's size that the samples
            of the search make; None: a training's rows are to be as long as `sample_shapes` says.
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
        micro_batch_shapes: Mapping[str, str] | None = None,
        samples: Samples | None = None,
        weighs_samples: bool = False,
        keeps_split: bool = False,
    ) -> None:
        self._plan, self._sample_shapes = plan, sample_shapes
        self._micro_batch_shapes, self._samples = micro_batch_shapes, samples
        self._keeps_split = keeps_split
        self._looks_left = _MAX_LOOKS if weighs_samples else 0
        self._has_looked = False
        self._warned: set[str] = set()

    def look(
        self, step: MicroBatches, *, stacklevel: int, gathered: Gathered | None = None
    ) -> None:
        """Warn of a step's batch, if there is a reason that was not given yet.

        A smaller batch is one only at first: the last of an epoch often is.

        Args:
            step: this rank's share of it, in micro-batches. What a training_step divides is whole,
                and without a batch where it makes that itself.
            stacklevel: of the line that the warning names.
            gathered: numbers of this rank -> those of every rank, each of which looks as often;
                None: this device trains alone.

        Raises:
            InvalidArgument: it would be split into more micro-batches, which changes the gradients;
                or a tensor that stays whole follows its samples.
        """
        samples, meant = sum(step.sizes), self._plan.samples_per_step
        steps = steps_for(samples, self._plan.micro_batch)
        whose = "" if gathered is None else " on this rank"
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
        if self._looks_left and (unequal := self._ignored_unequally(step, gathered)):
            self._looks_left = 0
            self._warn("ignored", unequal, stacklevel + 1)
        if samples > meant or (samples < meant and not self._has_looked):
            runs = f"the step runs as {counted(steps, 'micro-batch')} and updates on all {samples}"
            reason = "larger" if samples > meant else "smaller"
            self._warn(reason, f"{size}: {runs}", stacklevel + 1)
        self._has_looked = True
        named = dict(named_tensors(step.batches[0])) if step.batches else {}
        if steps > 1 and isinstance(self._samples, Rows):
            self._refuse_growing(named, self._samples)
        is_of_rows = self._micro_batch_shapes is None
        if longer := self._longer(named, step.sizes[0]) if is_of_rows else self._larger(step):
            self._warn("shape", longer, stacklevel + 1)

    def _uneven(self) -> str:
        """Return the plan's sizes where they differ, so that their product is not its samples."""
        sizes = sorted(set(self._plan.micro_batch_sizes), reverse=True)
        return f", in micro-batches of {' and '.join(map(str, sizes))}" if len(sizes) > 1 else ""

    def _ignored_unequally(self, step: MicroBatches, gathered: Gathered | None) -> str | None:
        if len(step.sizes) == 1 and gathered is None:
            return None
        batched = self._samples.batched if isinstance(self._samples, Rows) else None
        found = _valid_targets(step, batched, is_first=self._looks_left == _MAX_LOOKS)
        self._looks_left -= 1
        name, *own = max(
            found, key=lambda each: (each[3], each[2] - each[1]), default=("a batch", 0, 0, False)
        )
        fewest, most, ignores = zip(*([own] if gathered is None else gathered(*own)), strict=True)
        if not any(ignores) or max(most) - min(fewest) <= 1e-9:
            return None
        return (
            f"{name} of a training step has {min(fewest):.4g} targets a sample that are valid (not "
            f"{IGNORED}) in one micro-batch and {max(most):.4g} in "
            f"another{'' if gathered is None else ' of all ranks'}, "
            "so weighting by samples does not give the mean over valid targets. Pass loss_weight= "
            "(batch -> number of valid targets) to Workload or to apply"
        )

    def _larger(self, step: MicroBatches) -> str | None:
        """Warn if a tensor of a micro-batch has more elements than in any of the search's.

        One of fewer samples is as one of the plan's: it holds constants too.
        """
        size, shapes = self._plan.micro_batch, self._micro_batch_shapes or {}
        for batch, samples in zip(step.batches, step.sizes, strict=False):
            for name, tensor in named_tensors(batch):
                before = math.prod(shape_in(shapes[name])) / size if name in shapes else math.inf
                now = math.prod(shape_of(tensor)) / max(samples, size)
                if now > MAX_ABOVE_THE_MEAN * before:
                    return (
                        f"{name} has {now:.4g} elements a sample in a micro-batch of a training "
                        f"step, but {before:.4g} at most in the search's: the plan may not fit "
                        "larger samples, or may not be the fastest for them. Search again with the "
                        "largest samples"
                    )
        return None

    def _longer(self, named: Mapping[str, torch.Tensor], samples: int) -> str | None:
        """Warn if rows are longer than those of the search."""
        for name in named.keys() & self._sample_shapes.keys():
            ours, theirs = shape_of(named[name]), shape_in(self._sample_shapes[name])
            first = 1 if ours[:1] == [samples] else 0
            if len(ours) == len(theirs) and any(
                one > other for one, other in zip(ours[first:], theirs[first:], strict=True)
            ):
                return (
                    f"{name} of a training step is {shape_words(named[name])}, but was "
                    f"{self._sample_shapes[name]} in the sample batch: the plan may not fit longer "
                    "samples, or may not be the fastest for them. Search again with the longest "
                    "samples"
                )
        return None

    def _refuse_growing(self, named: Mapping[str, torch.Tensor], rows: Rows) -> None:
        """Refuse a tensor that every micro-batch would get whole although it is not constant.

        Its dimension 0 is not that of the sample batch, nor a length of samples, as that of
        position ids is.

        Raises:
            InvalidArgument: there is one.
        """
        lengths = {size for name in rows.batched & named.keys() for size in named[name].shape[1:]}
        for name in sorted(rows.whole & named.keys() & self._sample_shapes.keys()):
            now, before = list(named[name].shape[:1]), shape_in(self._sample_shapes[name])[:1]
            if now != before and not lengths.intersection(now):
                raise InvalidArgument(
                    f"{name} of a training step is {shape_words(named[name])}, but was "
                    f"{self._sample_shapes[name]} in the sample batch, where it was taken to be "
                    "the same for all samples: it cannot be cut. Search with samples and "
                    "Workload(collate_fn=)"
                )

    def _warn(self, reason: str, text: str, stacklevel: int) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(text, stacklevel=stacklevel + 1)


def _valid_targets(
    step: MicroBatches, batched: Collection[str] | None, *, is_first: bool
) -> Iterator[tuple[str, float, float, bool]]:
    """Yield names of tensors that may be targets, and whether any value of theirs is ignored.

    Between them, the fewest and the most values a sample of a micro-batch that are valid. Only
    tensors that are cut into micro-batches may be, where their names are known.
    """
    valid: dict[str, list[float]] = {}
    ignoring: set[str] = set()
    for batch, size in zip(step.batches, step.sizes, strict=False):
        for name, tensor in named_tensors(batch):
            is_cut = batched is None or name in batched
            if not is_cut or tensor.dtype not in (torch.int64, torch.int32) or tensor.is_nested:
                continue
            if tensor.layout is not torch.strided or not (is_first or tensor.device.type == "cpu"):
                continue  # reading values off a GPU waits for it
            count = int((tensor != IGNORED).sum())
            valid.setdefault(name, []).append(count / size)
            ignoring |= {name} if count < tensor.numel() else set()
    yield from ((name, min(each), max(each), name in ignoring) for name, each in valid.items())
