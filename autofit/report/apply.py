"""Trains a report's recommended plan on the user's own model, in the user's process.

A report remembers the functions of the search in the process that searched. A loaded one does not:
they are passed again. torch is imported only inside `apply`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from autofit.errors import InvalidArgument
from autofit.report.record import Record
from autofit.strategy import ALONE, Strategy, World
from autofit.units import kind_of
from autofit.world import check_ranks, world_of_environment

if TYPE_CHECKING:
    import torch

    from autofit.plan import Plan
    from autofit.training.loss import Recipe
    from autofit.training.samples import CollateFn, Samples
    from autofit.training.training import Training
    from autofit.training.workload import Workload

_LOSSES = {"loss_fn", "criterion", "training_step"}


def apply(
    record: Record,
    model: torch.nn.Module,
    optimizer: Any,
    given: Mapping[str, Any],
    *,
    batched: Iterable[str] | None,
    strategies: Iterable[str | Strategy] | None,
    remembered: Sequence[Strategy],
    workload: Workload | None,
) -> Training:
    """Return a training of the recommended plan on model and optimizer, as `Report.apply` says.

    Args:
        record, workload: of the search; workload None: not known in this process.
        model, optimizer, batched, strategies: see `Report.apply`.
        given: functions that replace those of the search, by name; None: the one of the search.
        remembered: the strategies of the search; the installed ones are used for other names.
    """
    from autofit.training.samples import SamplesKind
    from autofit.training.training import Training
    from autofit.training.watch import BatchWatch
    from autofit.training.workload import check_has_values

    functions = {name: value for name, value in given.items() if value is not None}
    samples = _samples(record, batched, functions.pop("collate_fn", None), workload)
    if record.lacks_loss and not functions.keys() & _LOSSES:  # any scalar shows memory and speed
        raise InvalidArgument(
            f"the search had no loss and used {record.workload['loss']}, which is no use for "
            "training: pass loss_fn= or criterion= to report.apply"
        )
    has_rows = record.workload.get("samples", SamplesKind.ROWS) == SamplesKind.ROWS
    recipe = _recipe(record, workload, functions)
    device = _device_of(model)
    _warn_of_another_size(record, model)
    world = _world_of(record.recommended.plan)
    if world.size == 1:  # ranks may get their values once the parameters are sharded
        check_has_values(model)
    has_training_step = recipe.training_step is not None
    made = _made_optimizer(optimizer, model, world, has_training_step=has_training_step)
    if any(training.holds(model, optimizer) for training in _TRAININGS):
        raise InvalidArgument(  # the strategies would be applied to it twice
            "this model or optimizer is in a training that has not ended: leave its with block, or "
            "call its undo(), before you call report.apply again"
        )
    training = Training(
        model,
        made,
        recipe,
        record.resolve_plan(strategies, remembered),
        device=device,
        samples=samples,
        watch=BatchWatch(
            record.plan_to_rerun.of_rank(world.rank),
            record.workload["sample_shapes"] if has_rows else {},
            micro_batch_shapes=record.workload.get("micro_batch_shapes"),
            samples=samples,
            weighs_samples=recipe.loss_weight is None
            and recipe.training_step is None
            and not record.workload.get("allow_accumulation_change"),
            keeps_split=record.workload.get("may_change_accumulation") is False,
        ),
        world=world,
    )
    _TRAININGS.add(training)
    return training


_TRAININGS: WeakSet[Training] = WeakSet()
"""All that were returned, and that somebody still holds."""


def _samples(
    record: Record,
    batched: Iterable[str] | None,
    collate_fn: CollateFn | None,
    workload: Workload | None,
) -> Samples:
    """Return how a step's samples become micro-batches: as in the search, or as given now.

    Raises:
        InvalidArgument: the search had a collate_fn that is not given again; or as of `_rows`.
    """
    from autofit.training.batch import shape_in
    from autofit.training.samples import Collated, Made, Rows, SamplesKind

    kind = record.workload.get("samples", SamplesKind.ROWS)
    if collate_fn is None and workload is not None and batched is None:
        collate_fn = workload.collate_fn
    knows_rows = batched is not None or "batched" in record.workload
    if collate_fn is not None:
        shapes = record.workload["sample_shapes"].items()
        dimensions = {name: len(shape_in(shape)) for name, shape in shapes}
        rows = Rows(*_rows(record, batched)) if knows_rows else None
        return Collated(collate_fn, rows, dimensions)
    if not knows_rows and kind == SamplesKind.COLLATED:
        raise InvalidArgument(
            "the search used collate_fn, and a loaded report holds no functions: pass "
            "collate_fn=... to apply"
        )
    if batched is None and kind == SamplesKind.MADE:
        return Made()
    return Rows(*_rows(record, batched))


def _rows(record: Record, batched: Iterable[str] | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return which tensors of a batch hold samples, as the search cut them, and the others.

    Raises:
        InvalidArgument: the report does not say, and neither does the caller; or there is no such
            tensor.
    """
    names = record.workload["sample_shapes"].keys()
    known = record.workload.get("batched") if batched is None else list(batched)
    if known is None:
        raise InvalidArgument(
            "the report does not say which tensors of a batch hold samples, and are cut into "
            f"micro-batches: pass batched=, with some of {', '.join(map(repr, names))}"
        )
    if strangers := [name for name in known if name not in names]:
        raise InvalidArgument(
            f"batched= names {', '.join(map(repr, strangers))}: the tensors of the sample batch "
            f"are {', '.join(map(repr, names))}"
        )
    return frozenset(known), frozenset(names) - frozenset(known)


def _world_of(plan: Plan) -> World:
    """Return the ranks that train the plan here.

    Raises:
        InvalidArgument: they are as many as the plan was not found for, or they have no process
            group.
    """
    world = world_of_environment()
    if plan.ranks == 1:
        return ALONE
    check_ranks(plan.ranks, world)
    import torch.distributed as dist

    if not dist.is_initialized():
        raise InvalidArgument(
            "the ranks have no process group: call torch.distributed.init_process_group() before "
            "report.apply"
        )
    return world


def _recipe(record: Record, workload: Workload | None, functions: dict[str, Any]) -> Recipe:
    from autofit.training.loss import Recipe

    if workload is not None:
        if functions.keys() & {"loss_fn", "criterion"}:  # either replaces the other
            functions = {"loss_fn": None, "criterion": None} | functions
        return replace(workload.recipe, **functions)
    given = (name for name in record.functions_given if name != "collate_fn")
    missing = [name for name in given if name not in functions]
    if functions.keys() & _LOSSES:
        missing = [name for name in missing if name not in _LOSSES]
    if missing:
        raise InvalidArgument(
            f"the search used {', '.join(missing)}, and a loaded report holds no functions: "
            f"pass {'=..., '.join(missing)}=... to apply"
        )
    return Recipe(**functions, clip_grad_norm=record.workload.get("clip_grad_norm"))


def _warn_of_another_size(record: Record, model: torch.nn.Module) -> None:
    """Warn if the model has another size: its memory and its module names are unknown."""
    from torch.nn.parameter import is_lazy

    parameters = list(model.parameters())
    if any(is_lazy(parameter) for parameter in parameters):
        raise InvalidArgument(
            "the model has parameters without a shape (lazy modules before their first forward): "
            "run one batch through it before you pass it"
        )
    there, here = record.workload.get("parameters"), sum(p.numel() for p in parameters)
    if there is not None and here != there:
        warnings.warn(
            f"this model has {here} parameters, but the model of the search had {there}: the plan "
            "may not fit, or may not be the fastest",
            stacklevel=4,
        )


def _device_of(model: Any) -> torch.device:
    is_like_one = hasattr(model, "parameters") and hasattr(model, "buffers")
    if isinstance(model, type) or not is_like_one:
        raise InvalidArgument(f"apply needs an nn.Module, got {model!r}")
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        device: torch.device = tensor.device
        return device
    raise InvalidArgument(
        f"the model ({kind_of(model)}) holds no parameter and no buffer: "
        "there is nothing to train, and no device to train on"
    )


def _made_optimizer(
    optimizer: Any, model: torch.nn.Module, world: World, *, has_training_step: bool
) -> Any:
    """Return the optimizer, or what makes that of several ranks once the parameters are sharded.

    Raises:
        InvalidArgument: it would fail in the first step, or train nothing.
    """
    import torch

    from autofit.training.optimizers import (
        build_optimizer,
        by_name,
        check_has_training_step,
        check_is_factory,
        check_trains,
    )

    if world.size > 1:
        check_is_factory(optimizer, has_training_step=has_training_step)
        return partial(build_optimizer, optimizer, place=None)
    check_has_training_step(optimizer, has_training_step=has_training_step)
    for one in by_name(optimizer).values():
        if isinstance(one, type) or not callable(getattr(one, "step", None)):
            raise InvalidArgument(
                "apply needs an optimizer over the model's parameters, such as "
                f"torch.optim.AdamW(model.parameters()), got {one!r}"
            )
        if isinstance(one, torch.optim.Optimizer):
            check_trains(one, model)
    return optimizer
