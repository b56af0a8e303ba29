"""Whether ranks that train together get the gradients of one process on all their samples.

One accumulation of a few samples that are shared unevenly, compared on every rank with the same
accumulation that this rank runs alone over all of them, before any wrapper is around the model. The
worst rank decides. It finds what torch does not report: parameters that are not synchronized since
the loss calls a submodule past the wrapper or since they are replaced after it, and losses that are
a mean over something else than they are weighted by. Parameters that not all ranks use are found
before, where each rank runs alone: such ranks cannot share gradients without waiting for one
another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autofit.dimension import payloads_of
from autofit.equivalence.comparison import (
    StepTrace,
    batch_normalizing,
    compare,
    moved_by_seed,
    step_without_update,
    traced_plan,
    traced_plans,
)
from autofit.errors import InvalidArgument, Unsupported, blame, in_one_line, release_exception
from autofit.plan import (
    Dimension,
    Plan,
    ResolvedPlan,
    Scalar,
    settings_of,
    split_evenly,
)
from autofit.strategy import Comparison, Phase, Strategy
from autofit.training.batch import Batch
from autofit.training.builder import TrainingBuilder
from autofit.training.evaluation import modes_kept
from autofit.training.ranks import Ranks
from autofit.training.training import Training
from autofit.training.workload import Workload
from autofit.units import quoted

_EACH = 3
"""The most samples of a rank: two micro-batches of different sizes."""


def shared_evenly_or_not(ranks: int) -> int:
    """Return a number of samples that this many ranks cannot share evenly."""
    return _EACH * ranks - 1


def unused_parameters(builder: TrainingBuilder) -> dict[str, frozenset[int]]:
    """Return the trainable parameters that get no gradient, each with the ranks where that is so.

    Each rank runs its share of a few samples alone, in the modes in which its modules are and with
    random numbers of its own, as it will train. Every rank of the builder's world calls this. Empty
    where a rank's run raises: the baseline's probe will meet the same fault and report it.
    """
    ranks, workload = Ranks(builder.world, builder.device.torch_device), builder.fresh_workload()
    if workload.training_step is not None:
        return {}
    own: Sequence[str] | None = None
    batch, _ = _batch_of_first(ranks, workload, shared_evenly_or_not(builder.world.size))
    try:
        own = None if batch is None else _unused_alone(builder, batch)
    except Exception as error:
        release_exception(error)
    finally:
        builder.reclaim_or_not()
    by_rank: list[Sequence[str] | None] = ranks.objects(own)
    if None in by_rank:
        return {}
    names = dict.fromkeys(name for of_rank in by_rank for name in of_rank or ())
    return {
        name: frozenset(rank for rank, of_rank in enumerate(by_rank) if name in (of_rank or ()))
        for name in names
    }


def _batch_of_first(ranks: Ranks, workload: Workload, samples: int) -> tuple[Batch | None, str]:
    """Return rank 0's batch, since each may have read or drawn its own; or why there is none."""
    batch, why = None, ""
    try:
        batch = workload.samples_of(samples)
    except Exception as error:
        why = in_one_line(error)
        release_exception(error)
    told: tuple[Batch | None, str] = ranks.of_first((batch, why))
    return told


def _unused_alone(builder: TrainingBuilder, batch: Batch) -> list[str]:
    world, workload = builder.world, builder.fresh_workload()
    sizes = split_evenly(shared_evenly_or_not(world.size), world.size)
    shares = workload.samples.divided(batch, sizes)
    share = next(each for rank, each in enumerate(shares) if rank == world.rank)
    builder.reclaim()
    with builder.training(workload, ResolvedPlan(Plan(sizes[world.rank]))) as training:
        trained = [name for name, p in training.model.named_parameters() if p.requires_grad]
        seen = step_without_update(training, share, seed=builder.seed + world.rank, calm=False)
    return [name for name in trained if name not in seen.gradients]


def compare_ranks(
    builder: TrainingBuilder,
    settings: Mapping[str, Scalar],
    payloads: Mapping[str, object],
    strategy: Strategy,
) -> Comparison | str:
    """Return how far a parallel strategy's gradients are from one process's, or why not.

    Every rank of the builder's world calls this, and gets the comparison of the worst, or that some
    rank could not run all samples alone, or that random numbers of the model's would move them by
    themselves. BatchNorm normalizes as in evaluation, since on several ranks it always differs.

    Raises:
        Exception: whatever the model or the device raises with the settings.
    """
    world, workload = builder.world, builder.fresh_workload()
    samples = shared_evenly_or_not(world.size)
    plan = Plan.split(samples, _EACH - 1, settings, ranks=world.size)
    together = ResolvedPlan(plan, payloads, (strategy,))
    ranks = Ranks(world, builder.device.torch_device)
    batch, missing = _batch_of_first(ranks, workload, samples)
    if batch is None:
        return f"cannot make a batch of {samples} samples: {missing}"
    alone = _alone(builder, batch, samples)
    told: list[bool | str] = ranks.objects(alone if isinstance(alone, str) else alone.calm)
    for rank, reason in enumerate(told):
        if isinstance(reason, str):
            return f"rank {rank} could not run {samples} samples alone: {reason}"
    calm = all(told)
    assert isinstance(alone, StepTrace)  # there is no reason why not
    second = traced_plan(
        builder, together, builder.seed, batch, _normalizing_as_evaluated, calm=calm
    )
    found: list[Comparison] = ranks.objects(compare(alone, second))
    worst = max(found, key=lambda each: max(each.gradient, each.loss))
    if worst.equal:
        return worst
    noise = max(ranks.objects(_noise_alone(builder, batch, alone, samples)))
    if noise:
        return (
            "the model draws random numbers that change the gradients of the same "
            f"samples by {noise:.1%}"
        )
    return worst


def _alone(builder: TrainingBuilder, batch: Batch, samples: int) -> StepTrace | str:
    """Return the step of all samples, or why there is none."""
    plans = [(ResolvedPlan(Plan(samples)), builder.seed)]
    try:
        return traced_plans(builder, plans, batch, _normalizing_as_evaluated)[0]
    except Exception as error:
        why = in_one_line(error)
        release_exception(error)
        return why


def _noise_alone(builder: TrainingBuilder, batch: Batch, alone: StepTrace, samples: int) -> float:
    """Return by how much another seed moves the step of all samples; 0 where roundings explain it.

    Raises no errors: what ran before and fails now is taken to be without noise.
    """
    try:
        found = moved_by_seed(builder, alone, batch, samples, _normalizing_as_evaluated)
    except Exception as error:
        release_exception(error)
        return 0.0
    return 0.0 if found.equal else max(found.gradient, found.loss)


@contextmanager
def _normalizing_as_evaluated(training: Training) -> Iterator[None]:
    model = training.plain_model
    with modes_kept(model):
        for name in batch_normalizing(model):
            model.get_submodule(name).training = False
        yield


def without_unequal(
    builder: TrainingBuilder,
    strategies: Sequence[Strategy],
    dimensions: Mapping[str, Dimension],
    raised: Mapping[tuple[str, Scalar], str | None],
) -> tuple[dict[str, Dimension], list[str]]:
    """Return the dimensions without parallel values whose gradients differ, and notes on them.

    Args:
        builder: of a rank; all ranks call this alike.
        strategies, dimensions: of the survey.
        raised: setting and value -> what was raised under it when it was compared before, which is
            not done again; None: memory ran out, and the value stays.

    Raises:
        InvalidArgument: no value of a setting is left.
        Exception: what a value raises; `autofit.errors.blamed` tells which. Its ranks may have
            parted ways: whoever asked replaces them all, and asks again with that in `raised`.
    """
    checked, notes = dict(dimensions), []
    if builder.fresh_workload().training_step is not None:
        notes.append("training_step hides its gradients, so the ranks' gradients were not compared")
        return checked, notes
    for strategy in strategies:
        own = settings_of(strategy.name, dimensions)
        if strategy.phase is not Phase.PARALLEL or not own:
            continue
        for at, name in enumerate(own):
            plain = {other: dimension.values[0] for other, dimension in own.items()}
            refused = {}
            for value in own[name].values[min(at, 1) :]:  # all first values together once
                settings = {**plain, name: value}
                if (name, value) in raised:
                    why = _why_raised(f"{name}={value}", raised[name, value], notes)
                else:
                    try:
                        payloads = payloads_of(own, settings)
                        why = _why_not(builder, strategy, settings, payloads, notes)
                    except Exception as error:
                        blame(error, name, value)
                        raise
                if why is not None:
                    refused[value] = f"{name}={value} {why}"
            notes += refused.values()
            left = [value for value in own[name].values if value not in refused]
            if not left:
                first = next(iter(refused.values()))
                raise InvalidArgument(f"no {name} gives the gradients of one process: {first}")
            own[name] = checked[name] = _with_values(own[name], left)
    return checked, notes


def _why_raised(named: str, text: str | None, notes: list[str]) -> str | None:
    """Return why a value under which this was raised is set aside; None, with a note: it is not."""
    if text is not None:
        return f"was skipped: {text}"
    notes.append(
        f"{named}: memory ran out, so the ranks' gradients were not compared with one process's"
    )
    return None


def _why_not(
    builder: TrainingBuilder,
    strategy: Strategy,
    settings: Mapping[str, Scalar],
    payloads: Mapping[str, object],
    notes: list[str],
) -> str | None:
    """Return why the settings are set aside; None: they train what one process does.

    Also None, with a note, where that cannot be told: their probes will show what they do.
    """
    try:
        found = compare_ranks(builder, settings, payloads, strategy)
    except Unsupported as error:  # on every rank
        release_exception(error)
        return f"was skipped: {error}"
    finally:
        builder.reclaim_or_not()
    if isinstance(found, str):
        note = f"gradients of several ranks were not compared with one process's: {found}"
        notes += [note] * (note not in notes)
        return None
    if found.equal:
        return None
    where = f", most of all in {quoted(found.modules)}" if found.modules else ""
    return (
        "was skipped: the gradients of the ranks differ from one process's by "
        f"{found.gradient:.1%}{where}. Call every module through the model that "
        "the loss gets, and replace no parameter. If the loss is a mean over "
        "something other than samples, pass Workload(loss_weight=)"
    )


def normalizing_apart(model: torch.nn.Module) -> list[str]:
    """Return a note if modules normalize over the batch of their own rank alone."""
    names = [
        name
        for name in batch_normalizing(model)
        if not isinstance(model.get_submodule(name), torch.nn.SyncBatchNorm)
    ]
    if not names:
        return []
    return [
        (
            f"{quoted(names)} normalize over their own rank's micro-batch, so several ranks "
            "train differently from one process. Under DistributedDataParallel the "
            "running statistics are those of rank 0, whose buffers are sent to all "
            "ranks before each optimizer step; under fully_shard each rank keeps its "
            "own, so save rank 0's. On GPUs, "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) shares them"
        )
    ]


def _with_values(dimension: Dimension, left: Sequence[Scalar]) -> Dimension:
    by_value: dict[str, Any] = {
        name: {value: of for value, of in getattr(dimension, name).items() if value in left}
        for name in ("payloads", "hints", "trial_costs_s", "accumulation")
    }
    lever = dimension.lever if dimension.lever in left[1:] else None
    return replace(dimension, values=left, lever=lever, **by_value)
