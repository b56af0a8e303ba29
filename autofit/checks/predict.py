"""`autofit.predict`: the memory that a plan needs on one GPU, or on several, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from autofit.checks.tuned import AskedPlan
from autofit.codec import to_json
from autofit.devices.gpu_catalogue import NCCL_BYTES, NCCL_UNKNOWN, Gpu, find_gpu, known_gpus
from autofit.errors import InvalidArgument, hides_own_frames
from autofit.notebook import shown
from autofit.plan import Plan
from autofit.prediction import predict as one_gpu
from autofit.prediction.predict import Prediction
from autofit.report.report import Report
from autofit.report.text import WIDTH, laid_out, table
from autofit.strategy import Strategy
from autofit.training.loss import STOOD_IN
from autofit.training.workload import Workload, workload_of
from autofit.units import format_bytes


@overload
def predict(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | Workload,
    sample_batch: Any = None,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    global_batch: int | None = None,
    plan: Plan | Report | None = None,
    gpu: str | int | Gpu | None = None,
    ranks: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Prediction: ...


@overload
def predict(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | Workload,
    sample_batch: Any = None,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    global_batch: int | None = None,
    plan: Plan | Report | None = None,
    gpu: list[Any] | tuple[Any, ...],
    ranks: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    progress: Callable[[str], object] | None = None,
) -> GpuTable: ...


@hides_own_frames
def predict(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | Workload,
    sample_batch: Any = None,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    global_batch: int | None = None,
    plan: Plan | Report | None = None,
    gpu: str | int | Gpu | list[Any] | tuple[Any, ...] | None = None,
    ranks: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Prediction | GpuTable:
    """Predict the memory of a plan on a GPU, without a GPU.

        autofit.predict(model, batch, criterion=loss, gpu="L4").fits("20GiB")

    A worker process runs the training on torch's meta device, where nothing is computed, and
    replays its allocations through a simulation of the CUDA caching allocator. Model and batch may
    lie on the CPU, on a GPU, or on the meta device, where they hold no memory.

    The same question is answered again without another dry run, whatever the weights and the
    floating-point numbers of the batch are. The integers of a batch count, since models read them:
    pass a batch of zeros on the meta device where yours does not.

    With several GPUs the result is a table: on each one, what the plan needs, whether it fits, and
    the largest micro-batch that does.

    Args:
        model: the module; a function of no arguments that builds one; or a `Workload`, alone.
        sample_batch: as for `search`, and as are the next four. Without a plan it is the
            micro-batch: what goes through the model at once.
        criterion: (output, target) -> scalar tensor.
        loss_fn: (model, batch) -> scalar tensor. Without a loss the mean of the outputs stands in,
            which needs less: `has_stand_in_loss`.
        optimizer: parameters -> Optimizer; or a live Optimizer.
        global_batch: samples of an optimizer step; None: those of the sample batch.
        plan: a plan, such as `Plan(8, settings={"precision.dtype": "bfloat16"})`; or a report,
            whose recommended plan is predicted with what its search measured; None: the baseline.
        gpu: a name such as "L4" or "A100-80GB", a size such as "24GiB", or bytes; None: the
            report's, else H200, which the answer says. Several: a list of these, or ["all"] for all
            that are known.
        ranks: how many GPUs train together, each with its share of the global batch; None:
            the plan's number, else one. The GPU that needs most is predicted, without NCCL.
        strategies: names or Strategy objects that may have settings in the plan; None: those whose
            settings the plan has.
        progress: called with a line about each GPU of a table.

    Returns:
        The prediction: `required_bytes`, with their `interval` and by `breakdown`; `.fits("24GiB")`
        and `.excess_bytes("24GiB")`; of several GPUs a `GpuTable`.

    Raises:
        InvalidArgument: an argument is not valid, there is no such GPU, setting or value, the
            workload cannot be sent to the worker, or the report is of another workload.
        PredictionUnavailable: the training needs values; the message names the line.
        WorkerFailed: the worker died, twice.
        Exception: raised by the user's own code.
    """
    trained = {"criterion": criterion, "loss_fn": loss_fn, "optimizer": optimizer}
    workload = workload_of(model, sample_batch, **trained, global_batch=global_batch)
    asked = AskedPlan.read(workload, plan)
    given: dict[str, Any] = {
        "plan": asked.plan,
        "strategies": strategies,
        "payloads": asked.payloads,
        "ranks": ranks,
    }
    if not isinstance(gpu, (list, tuple)):
        measured, name = asked.calibration_for(gpu), asked.gpu if gpu is None else gpu
        predicted = one_gpu.predict(workload, gpu=name, calibration=measured, **given)
        asked.check_same_model(predicted.parameters, workload)
        return predicted
    chosen = [one_gpu.calibrated(g, asked.calibration_for(g.name)) for g in _gpus(gpu)]
    tell = progress or (lambda line: None)
    table = GpuTable(*one_gpu.predict_each(workload, chosen, progress=tell, **given))
    asked.check_same_model(next(iter(table.predictions.values())).parameters, workload)
    return table


def _gpus(named: Sequence[Any]) -> list[Gpu]:
    """Return the GPUs by memory."""
    if not named:
        raise InvalidArgument('gpu is empty: name some, or pass ["all"] for all known ones')
    found = known_gpus() if list(named) == ["all"] else [find_gpu(each) for each in named]
    return sorted(found, key=lambda gpu: gpu.total_bytes)


def largest_words(largest: int | None, plan: Plan) -> str:
    """Return the largest micro-batch that fits, and whether the global batch allows no larger."""
    if largest is None:
        return "none"
    is_all = plan.global_batch is not None and largest * plan.ranks >= plan.global_batch
    return f"{largest}, the whole global batch" if is_all else str(largest)


_TITLES = ("GPU", "VRAM budget", "required", "fits", "largest micro-batch")


@dataclass(frozen=True)
class GpuTable:
    """What a plan needs on several GPUs.

    Attributes:
        predictions: by the name of the GPU, in the order of memory.
        lacking: GPU -> why the plan cannot run there, such as a type that it does not have.
    """

    predictions: Mapping[str, Prediction]
    lacking: Mapping[str, str]

    @property
    def fits(self) -> bool:
        """Whether the plan fits at least one of them."""
        return any(each.fits() for each in self.predictions.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        rows = [
            {**each.to_dict(), "fits": each.fits(), "largest_micro_batch": each.largest_micro_batch}
            for each in self.predictions.values()
        ]
        written: dict[str, Any] = to_json({"gpus": rows, "lacking": self.lacking})
        return written

    def __str__(self) -> str:
        rows = table(_TITLES, self._rows(), right=(1, 2))
        return laid_out([self._title, "", rows, "", *self._remarks()], WIDTH)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return shown([self._title, *self._remarks()], [_TITLES, *self._rows()])

    @property
    def _title(self) -> str:
        return f"{next(iter(self.predictions.values())).plan}, predicted"

    def _remarks(self) -> list[str]:
        first = next(iter(self.predictions.values()))
        lines = ["VRAM budget: all that is usable. Required: with the margin of the prediction"]
        if first.unknown_bytes:
            left = format_bytes(NCCL_BYTES)
            lines.append(f"NCCL: {NCCL_UNKNOWN}; ? means that {left} more would not fit")
        lines.append(f"Optimizer: {first.optimizer}{', the default' * first.assumes_optimizer}")
        lines += [f"{name}: {why}" for name, why in self.lacking.items()]
        lines += [STOOD_IN] if first.has_stand_in_loss else []
        notes = dict.fromkeys(note for each in self.predictions.values() for note in each.notes)
        lines += [f"note: {note}" for note in notes]
        return lines

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for name, each in self.predictions.items():
            needs, fits = format_bytes(each.interval[1]), each.fits()
            answer = {True: "yes", False: "no", None: "?"}[fits]
            largest = largest_words(each.largest_micro_batch, each.plan)
            yield name, format_bytes(each.gpu.usable_bytes), needs, answer, largest
