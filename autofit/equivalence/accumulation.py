"""Decide whether the accumulation steps may change, by comparing gradients on a few samples.

Where the gradients differ beyond rounding, all together or of one parameter, the count stays at the
baseline's unless the user allows otherwise, and a note says by how much they differ, where, and
what would free it.

Modules are compared as in evaluation, where random numbers do not hide a difference. So whether one
forward leaves what the next one reads (codebooks that follow the features, running normalizers) is
looked at apart, as modules train: such a forward sees other numbers in each micro-batch.

Equal gradients on the sample batch say nothing of batches with padding, over which many losses take
the mean of what is valid. So what could be padding is tried too: masks of the sample batch that
leave nothing out are altered, and targets of cross entropy that are several for a sample are
ignored. Where a mask matters, the count stays: the training has masks to leave something out.
Targets may never be ignored in the training, so there a note says for what equality was shown.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autofit.equivalence.comparison import (
    GRADIENT,
    ROOM,
    SAMPLES_OF_A_COMPARISON,
    Around,
    StepTrace,
    Tolerance,
    compare,
    distance,
    moved_by_seed,
    owners_of,
    perturbed,
    step_without_update,
    traced_plan,
    traced_plans,
)
from autofit.equivalence.steps import state_of
from autofit.errors import release_exception, with_type
from autofit.measurement import ACT
from autofit.plan import Plan, ResolvedPlan
from autofit.strategy import Comparison, undone
from autofit.training.batch import (
    Batch,
    describe,
    map_batched,
    named_tensors,
    tensors_of,
)
from autofit.training.builder import TrainingBuilder
from autofit.training.samples import Collated, Made, Rows, Samples
from autofit.training.training import Training
from autofit.training.watch import IGNORED
from autofit.training.workload import Workload
from autofit.units import quoted

_FREE = "options=SearchOptions(allow_accumulation_change=True)"
Repeated: TypeAlias = Callable[[], Iterable[StepTrace]]


@dataclass(frozen=True)
class SplitGradients:
    """Whether split batches may train in place of whole ones.

    Attributes:
        why_kept: why the accumulation steps may not change; None: they may.
        comparison: of split and whole gradients; None where it was not needed or failed.
        notes: for the reader of the report; the one about `why_kept` begins with it.
    """

    why_kept: str | None = None
    comparison: Comparison | None = None
    notes: tuple[str, ...] = ()


def compare_split_gradients(
    builder: TrainingBuilder,
    workload: Workload,
    *,
    lost: str | None = None,
) -> SplitGradients:
    """Decide whether split batches of the workload may train in place of whole ones.

    Args:
        builder: builds the trainings that are compared.
        workload: of the builder; its model is not used.
        lost: how comparing them lost a worker before, so that they are not; None: it did not.
    """
    if workload.global_batch is None or workload.global_batch == 1:
        return SplitGradients()
    if workload.training_step is not None:
        return _keep("training_step decides how a batch is split")
    if lost is not None:
        return _keep(f"split and whole gradients could not be compared ({lost})")
    try:
        samples = workload.samples
        if isinstance(samples, Made):
            return _keep(
                "the batches of a function n -> batch are not told apart into samples, so split "
                "and whole gradients could not be compared",
                way_out=f"samples and Workload(collate_fn=), or {_FREE}",
            )
        batch = workload.samples_of(SAMPLES_OF_A_COMPARISON)
        if isinstance(samples, Rows):
            batch = _with_distinct_samples(batch, samples.places(batch))
        if not _has_distinct(samples, batch):
            why = "copies of one sample do not show whether split gradients equal whole ones"
            return _keep(why, way_out="samples that differ")
        if isinstance(samples, Collated) and not _repeats(samples, batch):
            return _keep(
                "collate_fn makes another batch of the same samples each time, so split and whole "
                "gradients cannot be compared"
            )
        split = _split_against_whole(builder, batch)
        by_state = _second_against_first(builder, batch) if split.equal else None
    except Exception as error:
        release_exception(error)
        return _keep(f"split and whole gradients could not be compared ({with_type(error)})")
    finally:
        builder.reclaim_or_not()
    if by_state is not None:
        return _keep(_why_by_state(by_state), by_state.comparison)
    if split.equal:
        return _with_padding(builder, samples, batch, split.comparison)
    if split.noise is not None and not split.noise.equal:
        why = (
            "the model draws random numbers that change the gradients of the same samples by "
            f"{split.noise.gradient:.1%}, so split and whole gradients cannot be compared"
        )
        return _keep(why, split.comparison)
    return _keep_for_difference(split, workload)


def _keep(
    why: str,
    comparison: Comparison | None = None,
    *,
    way_out: str = _FREE,
    is_of_batch: bool = True,
) -> SplitGradients:
    """Return the decision to keep the accumulation steps.

    Args:
        why: so.
        comparison: that showed it.
        way_out: what to pass instead.
        is_of_batch: whether it was shown on the batch that was given, and not on one made of it.
    """
    # What is unknown, or only possible, asks for nothing
    mark = "" if comparison is None or not is_of_batch else ACT
    note = f"{mark}{why}: the accumulation steps were kept. To free them, pass {way_out}"
    return SplitGradients(why, comparison, (note,))


@dataclass(frozen=True)
class _GradientComparison:
    """Two ways to the gradients of the same samples.

    Attributes:
        comparison: of loss and gradients.
        apart: parameters whose own gradients differ by more than roundings explain -> how far;
            looked for where loss and all gradients together are equal.
        state: names of what the first way changed in the model.
        noise: of the first way with other random numbers, where the two are not equal.
    """

    comparison: Comparison
    apart: Mapping[str, float]
    state: tuple[str, ...] = ()
    noise: Comparison | None = None

    @property
    def equal(self) -> bool:
        return self.comparison.equal

    def by(self) -> str:
        """Return how far they differ, and where."""
        if not self.apart:
            return f"{self.comparison.gradient:.1%}"
        largest = sorted(self.apart, key=lambda name: -self.apart[name])[:3]
        told = ", ".join(f"{self.apart[name]:.1%} in {name!r}" for name in largest)
        return f"{told} ({self.comparison.gradient:.2%} of all gradients together)"


def _compare_each(first: StepTrace, second: StepTrace, repeated: Repeated) -> _GradientComparison:
    """Compare two steps; `repeated()` returns more of the first, which noise alone changes.

    A parameter may hide in the norm of all: the gradient of a router, or of a gate, is often a
    thousandth of it. So each is compared alone, with the tolerance of all relative to its own size.
    """
    found = compare(first, second)
    tolerance = Tolerance(found.tolerance, roundings=ROOM)
    if not found.equal or not tolerance.differences(first, second):
        return _GradientComparison(found, {})
    for again in repeated():
        tolerance.widen(first, again)
    differences = tolerance.differences(first, second)
    apart = {name.removeprefix(GRADIENT): size for name, size in differences.items()}
    found = replace(found, modules=owners_of(apart), differences=tuple(differences))
    return _GradientComparison(found, apart)


def _split_against_whole(
    builder: TrainingBuilder, batch: Batch, *arounds: Around
) -> _GradientComparison:
    samples, seed = SAMPLES_OF_A_COMPARISON, builder.seed
    sizes = samples, -(-samples // 2)
    whole, split = (ResolvedPlan(Plan.split(samples, size)) for size in sizes)
    first, second = traced_plans(builder, ((whole, seed), (split, seed)), batch, *arounds)

    def repeated() -> Iterator[StepTrace]:
        yield from traced_plans(builder, ((whole, seed + 1),), batch, *arounds)
        for draw in range(2):
            moved = partial(perturbed, by=first.rounding, seed=draw)
            yield from traced_plans(builder, ((whole, seed),), batch, *arounds, moved)

    found = _compare_each(first, second, repeated)
    if found.equal:
        return found
    return replace(found, noise=moved_by_seed(builder, first, batch, samples, *arounds))


def _second_against_first(builder: TrainingBuilder, batch: Batch) -> _GradientComparison | None:
    """Compare a step in training mode with one that finds what it left; None: they are equal.

    Also None where a step from the start differs as much: it draws numbers that no seed repeats.
    """
    plan, seed = ResolvedPlan(Plan(SAMPLES_OF_A_COMPARISON)), builder.seed
    builder.reclaim()
    with builder.training(builder.fresh_workload(), plan) as training:
        before = dict(state_of(training.model, updated=False))
        first = step_without_update(training, batch, seed=seed, calm=False)
        after = dict(state_of(training.model, updated=False))
        second = step_without_update(training, batch, seed=seed, calm=False)
    del training

    def again() -> StepTrace:
        return traced_plan(builder, plan, seed, batch, calm=False)

    found = _compare_each(first, second, lambda: [again()])
    if found.equal or not compare(first, again()).equal:
        return None
    return replace(found, state=_changed(before, after, first.normalizing))


def _changed(
    before: Mapping[str, Any], after: Mapping[str, Any], normalizing: Collection[str]
) -> tuple[str, ...]:
    """Return the names of what differs, tensors first.

    Statistics that only evaluation reads are none of them, nor random states, which a seed sets.
    """
    names = [
        name
        for name, value in after.items()
        if distance(before.get(name), value)
        and not name.endswith("random state")
        and name.rpartition(" ")[2].rpartition(".")[0] not in normalizing
    ]
    return tuple(sorted(names, key=lambda name: not torch.is_tensor(after[name])))


def _why_by_state(by_state: _GradientComparison) -> str:
    more = " and others" * (len(by_state.state) > 3)
    where = f"{', '.join(by_state.state[:3])}{more}" or "what it keeps outside its modules"
    return (
        f"a forward in training changes {where}, which the next one reads: it changes the "
        f"gradients of the same samples by {by_state.by()}, so split gradients differ from whole "
        "ones"
    )


def _keep_for_difference(split: _GradientComparison, workload: Workload) -> SplitGradients:
    """Return the decision where split gradients differ from whole ones."""
    comparison, way_out = split.comparison, _FREE
    what = "which normalize over the batch" if comparison.normalizes_over_batch else "most of all"
    where = f" (in {quoted(comparison.modules)}, {what})" if comparison.modules else ""
    if not comparison.normalizes_over_batch and workload.loss_weight is None:
        way_out += (
            ", or Workload(loss_weight=) where the loss is a mean over something other than samples"
        )
    why = f"Split gradients differ from whole ones by {split.by()}{'' if split.apart else where}"
    return _keep(why, comparison, way_out=way_out)


# Samples altered as padding alters them.

_KEPT = (1.0, 0.5, 0.75, 0.25, 0.5)
"""The share of each sample of a comparison that is not padding: another in each micro-batch."""


def _with_padding(
    builder: TrainingBuilder, samples: Samples, batch: Batch, comparison: Comparison
) -> SplitGradients:
    """Return the decision where split and whole gradients of the sample batch are equal.

    Samples that are collated have the padding that they have in the training.
    """
    equal = SplitGradients(None, comparison)
    if not isinstance(samples, Rows):
        return equal
    places = samples.places(batch)
    masks, masked = _masks_altered(batch, places)
    if masks and (found := _compare_altered(builder, masked)) is not None and not found.equal:
        why = (
            f"split gradients equal whole ones on the sample batch, whose masks "
            f"({', '.join(masks)}) leave nothing out, and differ by {found.by()} where they do"
        )
        way_out = f"Workload(loss_weight=) (what the masks leave), or {_FREE}"
        return _keep(why, found.comparison, way_out=way_out, is_of_batch=False)
    if builder.fresh_workload().loss_weight is not None:
        return equal
    found = _compare_altered(builder, batch, _targets_ignored)
    if found is None or found.equal:
        return equal
    mark = ACT if _has_ignored(batch, places) else ""
    note = (
        f"{mark}Padded targets (-100) would change gradients by {found.by()} when "
        "accumulating: pass Workload(loss_weight=)"
    )
    return replace(equal, notes=(note,))


def _compare_altered(
    builder: TrainingBuilder, batch: Batch, *arounds: Around
) -> _GradientComparison | None:
    """Return how split and whole compare on altered samples, or None if the model refuses those."""
    try:
        return _split_against_whole(builder, batch, *arounds)
    except Exception as error:
        release_exception(error)
        return None
    finally:
        builder.reclaim_or_not()


def _with_distinct_samples(batch: Batch, places: Collection[int]) -> Batch:
    """Return the batch with identical samples made to differ, where possible.

    Rolling a sample along its last dimension keeps what the elements mean: tokens, labels, pixels.
    Floating tensors of a single value become random in [0, 1), but for those of 1 that are not the
    first: they may be masks.
    """
    is_first = True

    def vary(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal is_first
        may_be_mask, is_first = not is_first, False
        if tensor.layout != torch.strided or _has_distinct_samples(tensor) or not tensor.numel():
            return tensor
        varied = tensor.detach()
        if varied.dim() > 1:
            varied = torch.stack([sample.roll(at, -1) for at, sample in enumerate(varied)])
        if varied.is_floating_point() and not _has_distinct_samples(varied):
            is_mask = may_be_mask and bool((varied == 1).all())
            varied = varied if is_mask else torch.rand_like(varied)
        return varied.requires_grad_(tensor.requires_grad)

    return map_batched(vary, batch, places)


def _has_distinct(samples: Samples, given: Any) -> bool:
    """Return whether not all samples are copies of one."""
    if isinstance(samples, Rows):
        tensors = tensors_of(given)
        return any(_has_distinct_samples(tensors[place]) for place in samples.places(given))
    alone = [tensors_of(each) for each in samples.micro_batches(given, [1] * len(given))]
    return any(not _equal(alone[0], each) for each in alone[1:])


def _repeats(samples: Samples, given: Any) -> bool:
    """Return whether the same samples make the same batch twice."""
    first, second = (
        [each for batch in samples.micro_batches(given, [len(given)]) for each in tensors_of(batch)]
        for _ in range(2)
    )
    return _equal(first, second)


def _equal(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(map(_same, ones, others))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal, where a NaN equals a NaN."""
    if one.is_nested and other.is_nested:
        return _equal(one.unbind(), other.unbind())
    return not distance(one, other)


def _has_distinct_samples(tensor: torch.Tensor) -> bool:
    return tensor.layout != torch.strided or not torch.equal(tensor[1:], tensor[:-1])


def _masks_altered(batch: Batch, places: Collection[int]) -> tuple[list[str], Batch]:
    """Return the names of masks that leave nothing out, and the batch with masks that do.

    A mask is all True, all False or all 1; what becomes 0 is valid where it was 1 before.
    """
    masks: list[str] = []
    names = (name for place, name in enumerate(describe(batch)) if place in places)

    def alter(tensor: torch.Tensor) -> torch.Tensor:
        name = next(names)
        if tensor.dim() < 2 or tensor.layout != torch.strided or not tensor.numel():
            return tensor
        value = tensor.flatten()[0].item()
        is_one = value == 1 or value is False
        if not is_one or tensor.shape[-1] < 2 or bool(tensor.ne(value).any()):
            return tensor
        masks.append(name)
        altered = tensor.clone()
        for at, sample in enumerate(altered):
            sample[..., _length(tensor.shape[-1], at) :] = not value
        return altered

    return masks, map_batched(alter, batch, places)


def _length(whole: int, sample: int) -> int:
    return max(1, round(whole * _KEPT[sample % len(_KEPT)]))


def _has_ignored(batch: Batch, places: Collection[int]) -> bool:
    """Return whether targets of the batch are ignored, or a mask of it leaves something out."""
    named = named_tensors(batch)
    for name, tensor in (named[place] for place in places):
        if tensor.layout != torch.strided or tensor.dim() < 2 or tensor.is_floating_point():
            continue
        if bool((tensor == IGNORED).any()):
            return True
        if "mask" in name and tensor.numel() and bool((tensor != tensor.flatten()[0]).any()):
            return True
    return False


@contextmanager
def _targets_ignored(training: Training) -> Iterator[None]:
    """Ignore some targets of each sample in cross entropies, in every micro-batch alike."""
    mode = _IgnoredTargets(training.plan.micro_batch_sizes)
    with undone(training.wrap_forward(mode.micro_batch, also_recomputation=False)):
        yield


class _IgnoredTargets(TorchFunctionMode):
    """Replaces targets of cross entropies by their `ignore_index`, which every kernel takes.

    Args:
        sizes: samples of each micro-batch, in the order of their forwards.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self._sizes, self._begun = sizes, 0

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Enter the forward and loss of the next micro-batch."""
        self._begun += 1
        with self:
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (functional.cross_entropy, functional.nll_loss):
            bound = inspect.signature(func).bind(*args, **kwargs or {})
            bound.apply_defaults()
            given = bound.arguments
            given["target"] = self._with_ignored(given["target"], given["ignore_index"])
            return func(*bound.args, **bound.kwargs)
        return func(*args, **kwargs or {})

    def _with_ignored(self, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
        first = sum(self._sizes[: self._begun - 1])
        samples = self._sizes[self._begun - 1]
        each, rest = divmod(target.numel(), samples)
        if rest or each < 2 or target.is_floating_point():
            return target  # one target a sample, which no training ignores; or probabilities
        ignored = target.reshape(samples, each).clone()
        for at, sample in enumerate(ignored, first):
            sample[_length(each, at) :] = ignore_index
        return ignored.reshape(target.shape)
