"""The loss of a `transformers.Trainer` as a function that travels to a worker."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.integrations.applied import library
from autofit.integrations.workloads import own_autocast
from autofit.training.batch import batch_size, tensors_of

AMP = {"bf16": "bfloat16", "fp16": "float16"}
"""Argument of a Trainer -> the type of its autocast."""
_LEFT_BEHIND = (
    "model",
    "model_wrapped",
    "train_dataset",
    "eval_dataset",
    "optimizer",
    "lr_scheduler",
    "callback_handler",
    "accelerator",
    "gather_function",
    "_memory_tracker",
    "deepspeed",
)
"""Attributes of a Trainer that its loss does without, and that are large or do not travel."""


class TrainerLoss:
    """(model, batch) -> the loss of one micro-batch as a mean, by a Trainer's `compute_loss`.

    A Trainer adds up the losses of a step's micro-batches, each of them divided by the items (valid
    tokens, say) of the whole step, or else by the number of micro-batches. So this is the share
    that a micro-batch adds, times their number. It depends on that number where a `compute_loss` of
    the user's own leaves the division out: then the accumulation stays as it is.

    It travels to the worker without the Trainer's model, data, optimizer and callbacks. Where the
    Trainer's own arguments ask for bf16 or fp16, it is computed under that autocast.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._precision = own_precision(trainer.args)
        # named here so that a study knows a training with another loss
        self._functions = (type(trainer).compute_loss, trainer.compute_loss_func)
        self._smoothing = trainer.args.label_smoothing_factor
        self._samples = samples_per_step(trainer.args)

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        model.train()  # as `Trainer.training_step` does
        micro_batches = self._samples / batch_size(batch)
        items = self._items_in(batch)
        with own_autocast(model, self._precision), self._with_model(model):
            loss: torch.Tensor = self._trainer.compute_loss(
                model,
                dict(batch),
                num_items_in_batch=None if items is None else micro_batches * items,
            )
        return micro_batches * loss if self._is_share(items) else loss

    def _is_share(self, items: Any) -> bool:
        """Whether the Trainer adds up these losses as they are, as its `training_step` decides."""
        trainer = self._trainer
        told: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
        if told is not None:
            return told
        counted = trainer.model_accepts_loss_kwargs and items is not None
        return counted or trainer.compute_loss_func is not None

    @contextmanager
    def _with_model(self, model: torch.nn.Module) -> Iterator[None]:
        """Have the Trainer know its model where it has left it behind, for `compute_loss` alone."""
        before = self._trainer.model
        if before is None:
            self._trainer.model = self._trainer.model_wrapped = model
        try:
            yield
        finally:
            if before is None:  # else a probe's model would outlive it
                self._trainer.model = self._trainer.model_wrapped = None

    def counts_items(self, batch: Any) -> bool:
        """Whether the Trainer takes its loss over the items of a step, such as valid tokens."""
        return self._items_in(batch) is not None

    def items(self, batch: Any) -> float:
        """What the loss of this batch is a mean over, as the Trainer counts it."""
        return float(self._items_in(batch))

    def _items_in(self, batch: Any) -> Any:
        device = next((tensor.device for tensor in tensors_of(batch)), torch.device("cpu"))
        return self._trainer._get_num_items_in_batch([batch], device)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what the loss does without; `__setstate__` makes an Accelerator anew."""
        trainer = copy.copy(self._trainer)
        for name in _LEFT_BEHIND:
            vars(trainer).pop(name, None)
        return {**vars(self), "_trainer": trainer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        cpu = self._trainer.args.use_cpu
        self._trainer.accelerator = library("accelerate").Accelerator(cpu=cpu)
        self._trainer.model = self._trainer.model_wrapped = None


def samples_per_step(args: Any) -> int:
    """Return the samples of an optimizer step."""
    return int(args.train_batch_size * args.gradient_accumulation_steps)


def own_precision(args: Any) -> str | None:
    """Return the type of autocast that the arguments ask for."""
    return next((dtype for name, dtype in AMP.items() if getattr(args, name)), None)
