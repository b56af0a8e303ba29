"""Updates in the backward pass: each parameter's as soon as its gradient is whole.

The gradient is then dropped, so that those of all parameters are never held at once. Optimizers of
torch update each parameter by its own gradient and state, so a step of one parameter after another
computes what a step of all does, to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from autofit.strategy import TrainingView

WHEN = "optimizer.when"
_NOT_IN_FORCE = (
    f"{WHEN}=backward: no parameter was updated in the backward pass, since whole gradients are "
    "used besides: train in one micro-batch, without clipping, a scaler and hooks of the optimizer"
)


@contextmanager
def updated_in_backward(training: TrainingView, optimizer: Optimizer) -> Iterator[Counter[int]]:
    """Update each parameter as soon as its gradient is whole, for as long as this is entered.

    Yield how often each was updated so, by its `id`.
    """
    updates: Counter[int] = Counter()

    def update(parameter: Tensor) -> None:
        updates[id(parameter)] += 1
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
        stack.callback(training.add_notes(lambda: [] if updates else [_NOT_IN_FORCE]))
        yield updates


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
    with updated_in_backward(training, optimizer) as updates:
        training.step(batch)
    if not updates or max(updates.values()) > 1:
        return None
    parameters = list(training.model.parameters())
    gradient_bytes = sum(each.nbytes for each in parameters if id(each) in updates)
    if gradient_bytes < _saved_bytes(partial(training.loss, batch)) / samples:
        return None
    held_bytes = sum(each.nbytes for each in parameters)
    states = [state for each in optimizer.state.values() for state in each.values()]
    held_bytes += sum(state.nbytes for state in states if is_dense(state))
    return held_bytes / (held_bytes + gradient_bytes)


def _saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Return the bytes that a forward saves for its backward; 0 where it may not be watched."""
    saved_bytes = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved_bytes
        saved_bytes += 0 if tensor.is_leaf and tensor.requires_grad else tensor.nbytes
        return tensor.detach()  # an output that is saved as it is would hold itself for good

    with suppress(RuntimeError), saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return saved_bytes


LINES = [
    "def update(parameter):  # by its gradient, as soon as that is whole",
    "    groups = optimizer.param_groups",
    '    (group,) = (g for g in groups if any(p is parameter for p in g["params"]))',
    '    parameters, group["params"] = group["params"], [parameter]',
    "    optimizer.param_groups = [group]",
    "    optimizer.step()",
    '    optimizer.param_groups, group["params"] = groups, parameters',
    "    parameter.grad = None",
    "",
    "for parameter in model.parameters():  # in place of optimizer.step() after the backward pass",
    "    if parameter.requires_grad:",
    "        parameter.register_post_accumulate_grad_hook(update)",
]
"""What a user would write to get the same, in a training of one micro-batch."""
