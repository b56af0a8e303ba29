"""`autofit.estimate_memory` and `autofit.fits`: predicted memory in one line, for many models."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from autofit.devices.gpu_catalogue import Gpu
from autofit.errors import InvalidArgument, hides_own_frames
from autofit.memory.allocator import ignored_options
from autofit.plan import Settings
from autofit.prediction.predict import Prediction, predict
from autofit.training.workload import Workload, workload_of

MAX_KNOWN = 4096
"""Predictions that are kept, of a few kilobytes each: more than a hyperparameter search has."""


class _Recent(OrderedDict[bytes, Any]):
    """The latest predictions, by what was asked."""

    def __setitem__(self, asked: bytes, predicted: Any) -> None:
        super().__setitem__(asked, predicted)
        if len(self) > MAX_KNOWN:
            self.popitem(last=False)


_known = _Recent()


@hides_own_frames
def estimate_memory(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | Workload,
    sample_batch: Any = None,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    global_batch: int | None = None,
    settings: Settings | None = None,
    gpu: str | int | Gpu | None = None,
) -> Prediction:
    """Predict the memory of a training on a GPU, without a GPU and without running it.

    A dry run, as of `autofit.predict`. Model and batch may lie on the CPU, on the meta device,
    where they hold no memory, or on a GPU. The same question is answered again without another dry
    run, whatever the weights and the floating-point numbers of the batch are. The integers of a
    batch count, since models read them: pass a batch of zeros on the meta device where yours does
    not. Arguments not explained here are as for `autofit.search`.

    Args:
        sample_batch: as large as a micro-batch: what goes through the model at once.
        global_batch: samples of an optimizer step; None: those of the sample batch.
        settings: of the plan, such as {"precision.dtype": "bfloat16"}; None: plain PyTorch.
        gpu: a name such as "L4" or "A100-80GB", a size such as "24GiB", or bytes; None: H200,
            which the answer says.

    Returns:
        The prediction: `required_bytes`, with their `interval` and by `breakdown`;
        `.fits("24GiB")`; `.excess_bytes("24GiB")`.

    Raises:
        InvalidArgument: an argument is not valid, or there is no such GPU; the known are named.
        PredictionUnavailable: the training needs values; the message names the line.
        WorkerFailed: the process that predicts died, twice.
        Exception: raised by the user's own code.
    """
    given = {"criterion": criterion, "loss_fn": loss_fn, "optimizer": optimizer}
    workload = workload_of(model, sample_batch, **given, global_batch=global_batch)
    return predict(workload, plan=workload.plan(settings=settings), gpu=gpu, cache=_known)


@hides_own_frames
def fits(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | Workload,
    sample_batch: Any = None,
    vram_budget: str | float | None = None,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    global_batch: int | None = None,
    settings: Settings | None = None,
    gpu: str | int | Gpu | None = None,
) -> bool:
    """Return whether a training fits into a VRAM budget, as `estimate_memory` predicts it.

    With the margin of the prediction: True is a promise, False is not the contrary.

    Args:
        vram_budget: "24GiB", bytes, or a fraction of the GPU's memory; None: all memory of `gpu`.

    Raises:
        InvalidArgument: as `estimate_memory`; or there is neither a budget nor a GPU, or no loss,
            without which a training would be taken to need too little.
        Exception: as of `estimate_memory`.
    """
    if vram_budget is None and gpu is None:
        raise InvalidArgument('fits needs a vram_budget such as "24GiB", or a gpu such as "L4"')
    predicted = estimate_memory(
        model,
        sample_batch,
        criterion=criterion,
        loss_fn=loss_fn,
        optimizer=optimizer,
        global_batch=global_batch,
        settings=settings,
        gpu=gpu,
    )
    for note in predicted.notes:
        if note != ignored_options():  # of which every prediction warns
            warnings.warn(note, stacklevel=3)
    if predicted.has_stand_in_loss:
        raise InvalidArgument(
            "fits needs a loss, without which a training would be taken to need too little: give "
            "criterion= or loss_fn="
        )
    return predicted.excess_bytes(vram_budget) <= 0
