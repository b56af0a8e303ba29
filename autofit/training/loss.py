"""How a workload trains: what its loss is, and what happens around the update.

A recipe holds functions of the user's and no model, so the same recipe serves a probe, a trace
and the user's own training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import torch

from autofit.errors import InvalidArgument
from autofit.training.batch import Batch, FlatBatch, tensors_of
from autofit.units import kind_of

# (training, batch on the device) -> loss. `Training` is made of such functions, so this names none.
TrainingStep: TypeAlias = Callable[[Any, Batch], torch.Tensor]

_UNPACKED = (
    "the batch was passed as model(*batch): if it is (input, target), pass "
    "criterion=(output, target) -> loss, or loss_fn=(model, batch) -> loss"
)


class LossSource(StrEnum):
    """Where a loss came from."""

    LOSS_FN = "loss_fn"
    CRITERION = "criterion"
    MODEL = "the model's own loss"
    STAND_IN = "the mean of the model's outputs stands in for a loss"
    TRAINING_STEP = "training_step"


# The note in every answer about a workload without a loss.
STOOD_IN = (
    f"the workload has no loss: {LossSource.STAND_IN}, and a real loss may "
    "take more memory. Pass criterion= or loss_fn=, or a batch with the "
    "labels that the model's own loss needs"
)


@dataclass(frozen=True)
class Recipe:
    """The parts of a training loop that are the user's own functions.

    Attributes:
        loss_fn: (model, batch) -> scalar tensor, the mean over samples.
        criterion: (output, target) -> scalar tensor; the batch is then (input, target).
        loss_weight: batch -> what the batch's loss is a mean over; None: its samples.
        before_step: (model, optimizer), called after unscaling and before the update.
        clip_grad_norm: clip the gradients' total norm to this before the update.
        training_step: (training, batch) -> loss, the whole optimizer step; the batch lies on the
            device. It updates by `training.backward(loss)` and `training.optimizer_step(name)`.
    """

    loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor] | None = None
    criterion: Callable[[Any, Any], torch.Tensor] | None = None
    loss_weight: Callable[[Batch], float] | None = None
    before_step: Callable[[torch.nn.Module, Any], None] | None = None
    clip_grad_norm: float | None = None
    training_step: TrainingStep | None = None

    def __post_init__(self) -> None:
        if self.loss_fn is not None and self.criterion is not None:
            raise InvalidArgument("pass loss_fn or criterion, not both")
        for name in ("loss_fn", "criterion", "loss_weight", "before_step", "training_step"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise InvalidArgument(f"{name} must be a function, got {function!r}")
        norm = self.clip_grad_norm
        number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        if norm is not None and not (number and 0 < norm < math.inf):
            raise InvalidArgument(f"clip_grad_norm must be a positive number, got {norm!r}")

    def weight(self, batch: Batch, samples: int) -> float:
        """Return the number of items that the loss of this batch of samples is a mean over.

        Raises:
            InvalidArgument: the user's function returned what no mean can be over.
        """
        if self.loss_weight is None:
            return float(samples)
        given = self.loss_weight(batch.whole() if isinstance(batch, FlatBatch) else batch)
        try:
            weight = float(given)
        except (TypeError, ValueError):  # None, or a text
            weight = math.nan
        if not 0 <= weight < math.inf:
            raise InvalidArgument(
                "loss_weight must return the number of items that the batch's loss is a "
                f"mean over, such as its valid tokens: 0 or more, got {str(given)[:80]}"
            )
        return weight

    def loss_and_source(
        self, model: torch.nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, LossSource]:
        """Return the loss and its source.

        Raises:
            InvalidArgument: the loss is not a scalar, or the model's output has nothing to average.
        """
        if self.loss_fn is not None:
            return scalar(self.loss_fn(model, batch), "loss_fn"), LossSource.LOSS_FN
        if self.criterion is not None:
            if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
                raise InvalidArgument(
                    f"with criterion= the batch must be (input, target), got {kind_of(batch)}; "
                    "for a list of samples pass collate_fn=, for any other batch loss_fn="
                )
            output = call_model(model, batch[0])
            return scalar(self.criterion(output, batch[1]), "criterion"), LossSource.CRITERION
        try:
            return _own_loss(call_model(model, batch))
        except TypeError as error:
            if isinstance(batch, (tuple, list)):
                error.add_note(_UNPACKED)
            raise


def call_model(model: torch.nn.Module, batch: Batch) -> Any:
    """`model(**batch)` for a mapping, `model(*batch)` for a tuple or list, else `model(batch)`.

    Raises:
        InvalidArgument: the model has no forward of its own.
    """
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, (tuple, list)):
            return model(*batch)
        return model(batch)
    except NotImplementedError as error:
        if f'Module [{type(model).__name__}] is missing the required "forward"' in str(error):
            raise InvalidArgument(_no_forward(model)) from None
        raise


def _no_forward(model: torch.nn.Module) -> str:
    asked = "pass loss_fn=(model, batch) -> loss"
    if hasattr(model, "training_step"):  # of a LightningModule
        asked += ", such as loss_fn=lambda model, batch: model.training_step(batch, 0)"
    return f"the model ({kind_of(model)}) has no forward() to call: {asked}"


def scalar(loss: Any, name: str) -> torch.Tensor:
    """A loss as a tensor without dimensions.

    Raises:
        InvalidArgument: it is not one number as a tensor; `name` says who made it.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        if isinstance(loss, torch.Tensor):
            got, way_out = f"one of shape {list(loss.shape)}", ": return its mean over the samples"
        else:
            got = kind_of(loss)
            way_out = ": leave .item() and float() out" * isinstance(loss, int | float)
        raise InvalidArgument(f"{name} must return a scalar tensor, got {got}{way_out}")
    return loss.reshape(())


def _own_loss(output: Any) -> tuple[torch.Tensor, LossSource]:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return scalar(loss, "the model's output.loss"), LossSource.MODEL
    if isinstance(output, torch.Tensor) and output.numel() == 1 and output.is_floating_point():
        return output.reshape(()), LossSource.MODEL
    floating = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    if not floating:
        raise InvalidArgument(
            f"the model returned {kind_of(output)}, with neither a loss nor a "
            "floating-point tensor to average: pass loss_fn=(model, batch) -> loss, "
            "or criterion=(output, target) -> loss"
        )
    return torch.stack([tensor.float().mean() for tensor in floating]).mean(), LossSource.STAND_IN
