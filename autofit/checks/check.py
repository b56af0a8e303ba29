"""`autofit.check`: does this workload train within this VRAM budget?

A probe decides where there is a GPU, and a prediction where there is none, or where a GPU is named.
A verdict is True only if a probe ran within the budget, or the prediction fits with its margin.

Under torchrun the answer is that of all ranks, which are probed together, or for which rank 0
predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autofit.checks.tuned import AskedPlan
from autofit.checks.verdict import Verdict
from autofit.devices.gpu_catalogue import Gpu, find_gpu
from autofit.errors import InvalidArgument, PredictionUnavailable, hides_own_frames
from autofit.measurement import Outcome, Trial
from autofit.plan import Plan, check_count
from autofit.prediction.predict import Prediction, plan_of_ranks, predict
from autofit.probing.probe import resolve_here, run_one
from autofit.probing.prober import Target
from autofit.probing.torchrun import owned_by_rank_0
from autofit.registry import load_strategies
from autofit.report.report import Report
from autofit.strategy import Strategy
from autofit.training.loss import STOOD_IN, LossSource
from autofit.training.workload import Workload, workload_of
from autofit.units import format_bytes
from autofit.world import world_of_environment

if TYPE_CHECKING:
    from autofit.probing.survey import Survey


@hides_own_frames
def check(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | Workload,
    sample_batch: Any = None,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    global_batch: int | None = None,
    plan: Plan | Report | None = None,
    vram_budget: str | float | None = None,
    gpu: str | int | Gpu | None = None,
    device: str | None = None,
    ranks: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    allow_stand_in_loss: bool = False,
) -> Verdict:
    """Check whether a plan trains within a VRAM budget.

        autofit.check(model, batch, criterion=loss, vram_budget="20GiB", gpu="L4").fits

    With a report the plan is its recommended one; its budget, its GPU and what its search measured
    there are used where no others are given. A plan that was tuned on the CPU is probed on the CPU.

    Args:
        model: the module; a function of no arguments that builds one; or a `Workload`, alone.
        sample_batch: as for `predict`.
        criterion: likewise.
        loss_fn: likewise.
        optimizer: likewise.
        global_batch: likewise.
        plan: the plan to check, or a report; None: the baseline.
        vram_budget: "24GiB", bytes, or a fraction of the GPU; None: all memory of `gpu` for a
            prediction, or the free memory of the device for a probe.
        gpu: the GPU to predict for, as for `predict`; None: the plan is probed where there is a
            GPU, and else predicted for an H200, within a budget that must be given. Several
            ranks are probed by those that torchrun started, and else predicted.
        device: where to probe, "cpu" included; None: cuda if there is one.
        ranks: as for `predict`; None under torchrun: as many as it started.
        strategies: as for `predict`.
        allow_stand_in_loss: answer for a workload without a loss too, with the mean of the model's
            outputs in its place; else `fits` is None, since a real loss takes more memory.

    Returns:
        The verdict: True is a promise; False of a prediction, which counts its margin, is not the
        contrary.

    Raises:
        InvalidArgument: an argument is not valid, both `gpu` and `device` are given, there is
            nothing to check against (no budget, GPU or device), or the report is of another
            workload, or was made on the CPU and its budget is not that of a GPU.
        DeviceUnavailable: the device does not exist.
        Exception: raised by the user's own code.
    """
    trained = {"criterion": criterion, "loss_fn": loss_fn, "optimizer": optimizer}
    workload = workload_of(model, sample_batch, **trained, global_batch=global_batch)
    tuned = AskedPlan.read(workload, plan)
    calibration = tuned.calibration_for(gpu)
    if tuned.plan is not None and tuned.record is not None and world_of_environment().size > 1:
        ranks = tuned.plan.ranks  # torchrun may have started others
    vram_budget, gpu, device = _as_tuned(tuned, vram_budget, gpu, device)
    verdict = _check(
        workload,
        tuned.plan,
        vram_budget,
        gpu,
        device,
        strategies,
        tuned.payloads,
        calibration,
        ranks,
        allow_stand_in_loss=allow_stand_in_loss,
    )
    tuned.check_same_model(verdict.parameters, workload)
    return verdict


def _as_tuned(
    tuned: AskedPlan,
    vram_budget: str | float | None,
    gpu: str | int | Gpu | None,
    device: str | None,
) -> tuple[str | float | None, str | int | Gpu | None, str | None]:
    """Return budget, GPU and device, and the report's where no others were given.

    Raises:
        InvalidArgument: a budget of the CPU would be compared with a prediction for a GPU.
    """
    if tuned.record is None:
        return vram_budget, gpu, device
    if tuned.on_cpu and gpu is None and device is None:
        device = "cpu"
    probes = will_probe(gpu, device)
    if vram_budget is None and tuned.on_cpu and not (probes and device == "cpu"):
        raise InvalidArgument(
            f"the report was made on the CPU, and its budget of "
            f"{format_bytes(tuned.record.vram_budget_bytes)} does not include a CUDA "
            "context: pass vram_budget, or neither gpu nor device"
        )
    if vram_budget is None:
        vram_budget = tuned.record.vram_budget_bytes
    # Naming the report's GPU requests a prediction, so do not where a probe is possible.
    return vram_budget, gpu if gpu is not None or probes else tuned.gpu, device


def _check(
    workload: Workload,
    plan: Plan | None,
    vram_budget: str | float | None,
    gpu: str | int | Gpu | None,
    device: str | None,
    strategies: Iterable[str | Strategy] | None,
    payloads: Mapping[str, Any] | None,
    calibration: Mapping[str, Any] | None,
    ranks: int | None,
    *,
    allow_stand_in_loss: bool,
) -> Verdict:
    """Check a plan as `check` does, by a probe or a prediction."""
    world = world_of_environment()
    ranks = None if ranks is None else check_count("ranks", ranks)
    if ranks is None and plan is not None and plan.ranks > 1:
        ranks = plan.ranks
    probes = will_probe(gpu, device)
    if world.size == 1 and ranks not in (None, 1):  # there are no others here to probe with
        probes = False
    if not probes and vram_budget is None and gpu is None:
        raise InvalidArgument(
            'there is nothing to check against: give vram_budget="24GiB" or gpu="L4", or '
            'device="cpu" to run the plan here'
        )
    chosen = load_strategies(strategies, plan=plan, ranks=world.size) if probes else ()

    def lead(owned: int) -> Verdict:
        asked, size = plan, owned if owned > 1 else ranks
        if size is not None and not (probes and plan is None):
            asked = plan_of_ranks(workload, plan, size)
        if probes:
            target = Target(device, vram_budget, ranks=owned)
            trial, survey = run_one(
                workload, chosen, target, lambda seen: resolve_here(asked, seen, chosen, payloads)
            )
            verdict = _by_probe(trial, survey)
            has_loss = survey.loss != LossSource.STAND_IN
            return verdict if has_loss or allow_stand_in_loss else _without_a_loss(verdict)
        unknown = _unknown(asked or workload.plan(), vram_budget, gpu)
        try:
            prediction = predict(
                workload,
                plan=asked,
                gpu=gpu,
                strategies=strategies,
                payloads=payloads,
                calibration=calibration,
            )
        except PredictionUnavailable as error:
            return replace(unknown, detail=str(error))
        if prediction.has_stand_in_loss and not allow_stand_in_loss:
            return _without_a_loss(replace(unknown, parameters=prediction.parameters))
        return _by_prediction(prediction, unknown)

    return owned_by_rank_0(lead, ranks=ranks if world.size > 1 else None)


def will_probe(gpu: str | int | Gpu | None, device: str | None) -> bool:
    """Return whether a check with these arguments runs the plan.

    Raises:
        InvalidArgument: both are given.
    """
    if gpu is not None and device is not None:
        raise InvalidArgument(
            f"gpu={gpu!r} asks for a prediction, and device={device!r} for a probe: leave one out"
        )
    return gpu is None and (device is not None or torch.cuda.is_available())


def _without_a_loss(verdict: Verdict) -> Verdict:
    return Verdict(
        None,
        verdict.plan,
        verdict.method,
        verdict.vram_budget_bytes,
        detail=f"{STOOD_IN}; or allow the stand-in (allow_stand_in_loss, --allow-stand-in-loss)",
        device=verdict.device,
        gpu=verdict.gpu,
        gpu_assumed=verdict.gpu_assumed,
        parameters=verdict.parameters,
    )


def _unknown(plan: Plan, vram_budget: str | float | None, gpu: str | int | Gpu | None) -> Verdict:
    """Return the verdict of a prediction before it is known."""
    found = find_gpu(gpu)
    return Verdict(
        None,
        plan,
        "predict",
        found.budget_bytes(vram_budget),
        device="cuda",
        gpu=found.name,
        gpu_assumed=gpu is None,
    )


def _by_prediction(prediction: Prediction, unknown: Verdict) -> Verdict:
    budget = unknown.vram_budget_bytes
    fits = prediction.fits(budget)
    largest = None
    if fits is False:
        with suppress(PredictionUnavailable):  # of other sizes; the plan's own answer stands
            largest = prediction.largest_micro_batch_within(budget)
    return replace(
        unknown,
        fits=fits,
        plan=prediction.plan,
        required_bytes=prediction.required_bytes,
        margin_bytes=prediction.interval[1] - prediction.required_bytes,
        breakdown=prediction.breakdown,
        largest_micro_batch=largest,
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        unknown_bytes=prediction.unknown_bytes,
        parameters=prediction.parameters,
        evaluation_bytes=prediction.evaluation_bytes,
        notes=prediction.notes,
    )


def _by_probe(trial: Trial, survey: Survey) -> Verdict:
    measured, environment, space = trial.measurement, survey.environment, survey.space()
    fits: bool | None = None
    if measured.outcome is Outcome.OK or measured.outcome.about_memory:
        fits = measured.ok
    required = measured.needed_bytes if measured.ok else None
    detail = measured.detail or (None if measured.ok else f"the probe ended as {measured.outcome}")
    return Verdict(
        fits,
        trial.plan.without({**space.fixed, **space.default_settings}),
        "probe",
        survey.vram_budget_bytes,
        required,
        detail=detail,
        peak_allocated_bytes=measured.peak_allocated_bytes if measured.ok else None,
        device=environment.device.partition(":")[0],
        gpu=environment.gpu,
        parameters=survey.parameters,
        evaluation_bytes=measured.evaluation_held_bytes if measured.ok else None,
    )
