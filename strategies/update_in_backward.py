"""Updates in the backward pass: each parameter's as soon as its gradient is whole.

The gradient is then dropped, so that those of all parameters are never held at once. Optimizers of
torch update each parameter by its own gradient and state, so a step of one parameter after another
computes what a step of all does, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from autofit.errors import Unsupported
from autofit.strategy import TrainingView

from .calls import saved_bytes

_NOT_IN_FORCE = (
    "optimizer.when=backward: no parameter was updated in the backward pass, since whole gradients "
    "are used besides: train in one micro-batch, without clipping, a scaler and hooks of the "
    "optimizer"
)


class UpdatedTwice(Unsupported):
    """One backward pass adds to a gradient more than once, so it was not whole at the first."""


@contextmanager
def updated_in_backward(training: TrainingView, optimizer: Optimizer) -> Iterator[set[int]]:
    """Update each parameter as soon as its gradient is whole, for as long as this is entered.

    Yield the `id` of each that was updated so in the step.

    Raises (a step):
        UpdatedTwice: a parameter gets a gradient after its update.
    """
    updated = set[int]()

    def update(parameter: Tensor) -> None:
        if id(parameter) in updated:
            raise UpdatedTwice(_twice(training, parameter))
        updated.add(id(parameter))
        groups = optimizer.param_groups  # as they are now
        (group,) = (each for each in groups if any(p is parameter for p in each["params"]))
        parameters, group["params"] = group["params"], [parameter]
        optimizer.param_groups = [group]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups, group["params"] = groups, parameters

    with ExitStack() as stack:
        for group in optimizer.param_groups:
            for parameter in [each for each in group["params"] if each.requires_grad]:
                step = partial(update, parameter)
                stack.callback(training.update_in_backward(parameter, step))
        stack.callback(training.before_micro_batch(lambda is_last: updated.clear()))
        stack.callback(training.add_notes(lambda: [] if updated else [_NOT_IN_FORCE]))
        yield updated


def _twice(training: TrainingView, parameter: Tensor) -> str:
    named = training.model.named_parameters()
    names = ", ".join(repr(name) for name, each in named if each is parameter)
    return (
        f"optimizer.when=backward: {names or 'a parameter'} was updated in the backward pass, "
        "and then got another gradient in it, as a reentrant checkpoint of a module that is called "
        "twice does. The weights are not those of plain training now: restore them, and train with "
        "optimizer.when=step, or with use_reentrant=False"
    )


def is_dense(value: Any) -> TypeGuard[Tensor]:
    """Return whether it is a tensor with memory of its own size."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def share_held(samples: int, training: TrainingView, batch: Any) -> float | None:
    """Step; return the bytes held between steps with updates in the backward, beside those without.

    None where the update is not by each parameter alone, something else uses whole gradients, one
    backward adds to a gradient more than once, or they take less than one more sample does.

    Args:
        samples: of the batch.
        training: a plain one of a copy of the model.
        batch: for a step.
    """
    optimizer = training.optimizer
    if not str(type(optimizer).__module__).startswith("torch.optim."):
        training.step(batch)
        return None  # others may keep what is of all parameters
    try:
        with updated_in_backward(training, optimizer) as updated:
            training.step(batch)
    except UpdatedTwice:
        return None
    if not updated:
        return None
    parameters = list(training.model.parameters())
    gradient_bytes = sum(each.nbytes for each in parameters if id(each) in updated)
    with suppress(RuntimeError):  # they may not be watched
        if gradient_bytes < saved_bytes(training.model, partial(training.loss, batch)) / samples:
            return None
    held_bytes = sum(each.nbytes for each in parameters)
    states = [state for each in optimizer.state.values() for state in each.values()]
    held_bytes += sum(state.nbytes for state in states if is_dense(state))
    return held_bytes / (held_bytes + gradient_bytes)
