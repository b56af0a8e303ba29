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
    chosen = [one_gpu.calibrated(g, asked.calibration_for(g.name)) for g in gpus_by_memory(gpu)]
    tell = progress or (lambda line: None)
    table = GpuTable(*one_gpu.predict_each(workload, chosen, progress=tell, **given))
    asked.check_same_model(next(iter(table.predictions.values())).parameters, workload)
    return table


def gpus_by_memory(named: Sequence[Any]) -> list[Gpu]:
    """Return the GPUs that are named, by memory; "all" alone names all that are known.

    Raises:
        InvalidArgument: none is named, or one is not known.
    """
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


_TITLES = ("GPU", "VRAM budget", "required", "fits", "largest micro-batch", "speed (estimate)")
SPEED_WORDS = (
    "Speed: by a roofline, as a multiple of the slowest GPU here that trains the model at all; an "
    "estimate, not a measurement"
)


def seconds_of_a_sample(prediction: Prediction) -> float | None:
    """Return the roofline's time, good for ratios alone; None: unknown, or no size fits."""
    cost, plan = prediction.micro_batch_cost, prediction.plan
    if cost is None or plan.ranks > 1 or prediction.largest_micro_batch is None:
        return None
    return cost.seconds / plan.micro_batch


def relative_speeds(seconds: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return speeds as multiples of the slowest, from the seconds that each takes."""
    slowest = max((each for each in seconds.values() if each), default=None)
    return {name: slowest / each if slowest and each else None for name, each in seconds.items()}


def speed_words(speed: float | None) -> str:
    """Return a relative speed in words, in two digits."""
    return "-" if speed is None else f"{float(f'{speed:.2g}'):g}x"


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
    def fits(self) -> bool | None:
        """Whether the plan fits at least one of them; None: it cannot be told of any."""
        answers = [each.fits() for each in self.predictions.values()]
        return True if True in answers else None if None in answers else False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        speeds = self._speeds()
        rows = [
            {
                **each.to_dict(),
                "largest_micro_batch": each.largest_micro_batch,
                "relative_speed_estimate": speeds[name],
            }
            for name, each in self.predictions.items()
        ]
        written: dict[str, Any] = to_json({"gpus": rows, "lacking": self.lacking})
        return written

    def __str__(self) -> str:
        rows = table(_TITLES, self._rows(), right=(1, 2, 5))
        return laid_out([self._title, "", rows, "", *self._remarks()], WIDTH)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return shown([self._title, *self._remarks()], [_TITLES, *self._rows()])

    @property
    def _title(self) -> str:
        return f"{next(iter(self.predictions.values())).plan}, predicted"

    def _speeds(self) -> dict[str, float | None]:
        each = self.predictions.items()
        return relative_speeds({name: seconds_of_a_sample(found) for name, found in each})

    def _remarks(self) -> list[str]:
        lines = ["VRAM budget: all that is usable. Required: with the margin of the prediction"]
        lines += [SPEED_WORDS] if any(self._speeds().values()) else []
        return lines + self.notes

    @property
    def notes(self) -> list[str]:
        """What was left out or assumed, and which GPUs cannot run the plan."""
        first = next(iter(self.predictions.values()))
        lines: list[str] = []
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
        speeds = self._speeds()
        for name, each in self.predictions.items():
            needs, fits = format_bytes(each.interval[1]), each.fits()
            answer = {True: "yes", False: "no", None: "?"}[fits]
            largest = largest_words(each.largest_micro_batch, each.plan)
            budget, speed = format_bytes(each.gpu.usable_bytes), speed_words(speeds[name])
            yield name, budget, needs, answer, largest, speed
