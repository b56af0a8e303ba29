"""`autofit.predict`: the memory that a plan needs on one GPU, or on several, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

from autofit.checks.gpu_table import GpuTable, predict_gpus
from autofit.checks.tuned import AskedPlan
from autofit.devices.gpus import Gpu
from autofit.errors import hides_own_frames
from autofit.plan import Plan
from autofit.prediction import predict as one_gpu
from autofit.prediction.predict import Prediction
from autofit.report.report import Report
from autofit.strategy import Strategy
from autofit.training.workload import Workload


@overload
def predict(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    gpu: str | int | Gpu | None = None,
    world_size: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
) -> Prediction: ...


@overload
def predict(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    gpu: list[Any] | tuple[Any, ...],
    world_size: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    progress: Callable[[str], object] | None = None,
) -> GpuTable: ...


@hides_own_frames
def predict(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    gpu: str | int | Gpu | list[Any] | tuple[Any, ...] | None = None,
    world_size: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Prediction | GpuTable:
    """Predict the memory of a plan on a GPU, without a GPU.

    A worker process runs the training on torch's meta device, where nothing is computed, and
    replays its allocations through a simulation of the CUDA caching allocator.

    With several GPUs the result is a table: on each one, what the plan and its variants need,
    whether they fit, and the largest micro-batch that does.

    Args:
        workload: what is trained.
        plan: a plan, or a report, whose best plan is predicted with what its search measured;
            None: the baseline. In a table other micro-batches keep its global batch, or where it
            has none its accumulation steps.
        gpu: a name such as "L4" or "A100-80GB", a size such as "24GiB", or bytes; None: the
            report's, else H200. Several: a list of these, or ["all"] for all that are known.
        world_size: how many GPUs train together, each with its share of the global batch; None:
            the plan's number, else one. The GPU that needs most is predicted, without NCCL.
        strategies: names or Strategy objects that may have settings in the plan; None: those whose
            settings the plan has, and in a table all that are installed.
        progress: called with a line about each GPU of a table.

    Raises:
        InvalidArgument: an argument is not valid, there is no such GPU, setting or value, the
            workload cannot be sent to the worker, or the report is of another workload.
        PredictionUnavailable: the training needs values; the message names the line.
        WorkerFailed: the worker died, twice.
        Exception: raised by the user's own code.
    """
    asked = AskedPlan.read(workload, plan)
    if isinstance(gpu, (list, tuple)):
        predicted: Prediction | GpuTable = predict_gpus(
            workload,
            gpus=gpu,
            plan=asked.plan,
            payloads=asked.payloads,
            world_size=world_size,
            strategies=strategies,
            progress=progress,
        )
    else:
        predicted = one_gpu.predict(
            workload,
            plan=asked.plan,
            gpu=asked.gpu if gpu is None else gpu,
            strategies=strategies,
            payloads=asked.payloads,
            calibration=asked.calibration_for(gpu),
            world_size=world_size,
        )
    asked.check_same_model(predicted.parameters, workload)
    return predicted
