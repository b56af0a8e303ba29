"""From a report to a live training in the user's own process.

What the search was given is remembered in its process; a loaded report holds no functions, and is
told them anew. Nothing but `apply` imports torch.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidRequest
from autofit.report.record import Record

if TYPE_CHECKING:
    import torch

    from autofit.strategy import Strategy
    from autofit.training.loss import Recipe
    from autofit.training.training import Training
    from autofit.training.workload import Workload

_SAY_THE_LOSS = {"loss_fn", "criterion", "train_step"}


def apply(
    record: Record,
    model: torch.nn.Module,
    optimizer: Any,
    said: Mapping[str, Any],
    *,
    strategies: Iterable[str | Strategy] | None,
    remembered: Sequence[Strategy],
    workload: Workload | None,
) -> Training:
    """The best plan on that model and optimizer.

    Args:
        record: of the search.
        model, optimizer: the user's own.
        said: the functions that are given anew, by name; None: as the search was given it.
        strategies: names or Strategy objects that are given anew, before any other of their names.
        remembered: those of the search; empty: the installed ones of the plan's names.
        workload: what was searched; None: not known here.

    Raises:
        InvalidRequest: see `Report.apply`.
    """
    from autofit.training.training import Training

    _warn_of_a_stand_in(record, said)
    given = {name: value for name, value in said.items() if value is not None}
    recipe = _recipe(record, workload, given)
    device = _device_of(model)
    _warn_of_another_size(record, model)
    _check_live(optimizer, model, has_train_step=recipe.train_step is not None)
    return Training(
        model,
        optimizer,
        recipe,
        record.resolve_best(strategies, remembered),
        device=device,
    )


def _warn_of_a_stand_in(record: Record, said: Mapping[str, Any]) -> None:
    """For memory and speed any scalar will do; a model is not to be trained on it unawares."""
    from autofit.training.loss import LossSource

    if record.workload.get("loss") != LossSource.STAND_IN:
        return
    if all(said.get(name) is None for name in _SAY_THE_LOSS):
        warnings.warn(
            f"no loss was given: this trains {LossSource.STAND_IN}; pass loss_fn= or criterion=",
            stacklevel=4,
        )


def _recipe(record: Record, workload: Workload | None, said: dict[str, Any]) -> Recipe:
    from autofit.training.loss import Recipe

    if workload is not None:
        if said.keys() & {"loss_fn", "criterion"}:
            said = {"loss_fn": None, "criterion": None} | said
        return replace(workload.recipe, **said)
    missing = [name for name in record.functions_given if name not in said]
    if said.keys() & _SAY_THE_LOSS:
        missing = [name for name in missing if name not in _SAY_THE_LOSS]
    if missing:
        raise InvalidRequest(
            f"the search was given {', '.join(missing)}, and a loaded report holds no "
            f"functions: pass {'=..., '.join(missing)}=... to apply"
        )
    return Recipe(**said, clip_grad_norm=record.workload.get("clip_grad_norm"))


def _warn_of_another_size(record: Record, model: torch.nn.Module) -> None:
    """What another model needs, and which of its modules a plan names, is not known."""
    from torch.nn.parameter import is_lazy

    parameters = list(model.parameters())
    if any(is_lazy(parameter) for parameter in parameters):
        raise InvalidRequest(
            "the model has parameters without a shape, as lazy modules do before their first "
            "forward: run one batch through it before you hand it over"
        )
    there, here = record.workload.get("parameters"), sum(p.numel() for p in parameters)
    if there is not None and here != there:
        warnings.warn(
            f"this model has {here} parameters, and the one that was searched had {there}: the "
            "plan may not fit, or not be the fastest",
            stacklevel=4,
        )


def _device_of(model: Any) -> torch.device:
    if not (hasattr(model, "parameters") and hasattr(model, "buffers")):
        raise InvalidRequest(f"apply trains a live nn.Module, got {model!r}")
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        device: torch.device = tensor.device
        return device
    raise InvalidRequest(
        f"the model (a {type(model).__name__}) holds no parameter and no buffer: "
        "there is nothing to train, and no device to train on"
    )


def _check_live(optimizer: Any, model: torch.nn.Module, *, has_train_step: bool) -> None:
    """What cannot step would show in the middle of the first step, what trains nothing never."""
    import torch

    from autofit.training.optimizers import by_name, check_has_train_step, check_trains

    check_has_train_step(optimizer, has_train_step=has_train_step)
    for one in by_name(optimizer).values():
        if isinstance(one, type) or not callable(getattr(one, "step", None)):
            raise InvalidRequest(
                "apply steps a live optimizer over the model's parameters, such as "
                f"torch.optim.AdamW(model.parameters()), got {one!r}"
            )
        if isinstance(one, torch.optim.Optimizer):
            check_trains(one, model)
