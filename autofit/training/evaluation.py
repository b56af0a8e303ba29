"""An evaluation step beside a live training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from autofit.errors import InvalidArgument
from autofit.measurement import IN_EVALUATION
from autofit.training.batch import Batch
from autofit.units import counted

if TYPE_CHECKING:
    from autofit.training.training import Training

# (model, batch on the device) -> anything, which is dropped.
EvalStep: TypeAlias = Callable[[torch.nn.Module, Batch], Any]


def check_evaluation(eval_step: object, eval_batch: object) -> None:
    """Refuse one without the other.

    Raises:
        InvalidArgument: only one is given, or the step is no function.
    """
    if (eval_step is None) != (eval_batch is None):
        given, missing = ("eval_step", "eval_batch")[:: 1 if eval_batch is None else -1]
        raise InvalidArgument(
            f"{given} was given without {missing}: an evaluation takes both, "
            "eval_step=(model, batch) -> anything and eval_batch= a batch, or its samples"
        )
    if eval_step is not None and not callable(eval_step):
        raise InvalidArgument(f"eval_step must be a function, got {eval_step!r}")


def evaluate(training: Training, eval_step: EvalStep, batch: Batch, samples: int) -> None:
    """Run an evaluation step as between two training steps: without gradients, in eval mode.

    It runs under the contexts of the plan's forward passes, such as autocast. Values of the model
    that it changes stay changed.

    Args:
        training: that has stepped; it is left in the mode it was in.
        eval_step: of the user.
        batch: on the device.
        samples: of the batch, for messages.

    Raises:
        Exception: what the user's code or the device raised.
    """
    model = training.model
    with modes_kept(model), torch.no_grad(), training.context(), _named(samples):
        model.eval()
        eval_step(model, batch)


@contextmanager
def modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Give each module its mode again, training or evaluation, and nothing else."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _named(samples: int) -> Iterator[None]:
    """Say of an out-of-memory error that it is one of the evaluation."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.args = (f"{IN_EVALUATION}{counted(samples, 'sample')}: {error}",)
        raise
