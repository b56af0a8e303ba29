"""`autofit.check`: does this workload train within this VRAM budget?

A probe decides where there is a GPU, and a prediction where there is none: an emulation or a
rehearsal. A verdict is True only if a probe ran within the budget, or the prediction fits with its
margin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autofit.checks.verdict import Verdict
from autofit.devices.gpus import Gpu, find_gpu
from autofit.devices.request import budget_bytes
from autofit.errors import CannotTell, InvalidRequest, hides_own_frames
from autofit.measurement import Outcome, Trial
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.methods import method_of_ranks, method_taken, plan_of_ranks
from autofit.prediction.predict import Calibration, Prediction, predict
from autofit.probing.prober import Target
from autofit.registry import load_strategies, resolve
from autofit.strategy import Strategy
from autofit.training.workload import Workload, check_arguments

if TYPE_CHECKING:
    from autofit.probing.survey import Survey

METHODS = ("auto", "probe", "emulate", "rehearse")
FORMER_METHODS = {"predict": "rehearse"}
"""Names that are still accepted, and what they mean."""


@hides_own_frames
def check(
    workload: Workload,
    *,
    plan: Plan | None = None,
    vram_budget: str | float | None = None,
    gpu: str | int | Gpu | None = None,
    method: str = "auto",
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    payloads: Mapping[str, Any] | None = None,
    calibration: Calibration | Mapping[str, Any] | None = None,
    world_size: int | None = None,
) -> Verdict:
    """Check whether a plan trains within a VRAM budget.

    Args:
        workload: model, sample batch, loss and optimizer.
        plan: the plan to check; None: the baseline.
        vram_budget: "24GiB", bytes, or a fraction of the GPU; None: all memory of `gpu` for a
            prediction, or the free memory of the device for a probe.
        gpu: the GPU to predict for, as for `predict`.
        method: "probe" runs the plan on this machine's device; "emulate" and "rehearse" need none,
            see `predict`; "auto" probes if there is a GPU and `gpu` is None, and else predicts.
        device: where to probe; None: cuda if there is one.
        strategies, payloads, calibration, world_size: as for `predict`; several ranks are
            rehearsed, never probed.

    Raises:
        InvalidRequest: an argument is not valid.
        DeviceUnavailable: method="probe", and the device does not exist.
        EmulationUnavailable: method="emulate", and what it takes is missing.
        Exception: raised by the user's own code.
    """
    check_arguments(workload, plan, payloads)
    learned = Calibration.of(calibration)
    found = find_gpu(gpu)
    chosen_plan = plan
    if world_size is not None or (plan is not None and plan.world_size > 1):
        chosen_plan = plan_of_ranks(workload, plan, world_size)
        former = FORMER_METHODS.get(method, method)
        method = method_of_ranks(former, chosen_plan.world_size)
    if will_probe(method, gpu, device):
        from autofit.probing.probe import run_one

        chosen, target = load_strategies(strategies), Target(device, vram_budget)

        def resolved(survey: Survey) -> ResolvedPlan:
            return resolve(chosen_plan, survey.space_for(chosen_plan), chosen, payloads)

        return _by_probe(*run_one(workload, chosen, target, resolved))
    method = FORMER_METHODS.get(method, method)
    budget = budget_bytes(
        1.0 if vram_budget is None else vram_budget,
        total_bytes=found.total_bytes,
        free_bytes=found.total_bytes,
    )
    unknown = Verdict(
        None,
        chosen_plan or workload.plan(),
        method_taken(method, workload.model),
        budget,
        device="cuda",
        gpu=found.name,
        gpu_assumed=gpu is None,
    )
    try:
        prediction = predict(
            workload,
            plan=chosen_plan,
            gpu=gpu,
            method=method,
            strategies=strategies,
            payloads=payloads,
            calibration=learned,
        )
    except CannotTell as error:
        return replace(unknown, detail=str(error))
    return _by_prediction(prediction, unknown)


def will_probe(method: str, gpu: str | int | Gpu | None, device: str | None) -> bool:
    """Return whether a check with these arguments runs the plan.

    Raises:
        InvalidRequest: there is no such method.
    """
    if method not in (*METHODS, *FORMER_METHODS):
        raise InvalidRequest(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method == "auto":
        return gpu is None and (device is not None or torch.cuda.is_available())
    return method == "probe"


def _by_prediction(prediction: Prediction, unknown: Verdict) -> Verdict:
    budget = unknown.vram_budget_bytes
    fits = prediction.fits(budget)
    largest = None
    if fits is False:
        with suppress(CannotTell):  # of other sizes; the plan's own answer stands
            largest = prediction.largest_micro_batch_within(budget)
    return replace(
        unknown,
        fits=fits,
        method=prediction.method,
        plan=prediction.plan,
        required_bytes=prediction.required_bytes,
        margin_bytes=prediction.interval[1] - prediction.required_bytes,
        breakdown=prediction.breakdown,
        largest_micro_batch=largest,
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        required_bytes_low=prediction.interval[0] if prediction.method == "emulate" else None,
        computed_values=prediction.computed_values,
        estimates=prediction.estimates,
        unknown_bytes=prediction.unknown_bytes,
    )


def _by_probe(trial: Trial, survey: Survey) -> Verdict:
    measured, environment, space = trial.measurement, survey.environment, survey.space()
    fits: bool | None = None
    if measured.outcome is Outcome.OK or measured.outcome.about_memory:
        fits = measured.ok
    required = measured.held_bytes if measured.ok else None
    detail = measured.detail or (None if measured.ok else f"the probe ended as {measured.outcome}")
    return Verdict(
        fits,
        trial.plan.without({**space.fixed, **space.plain_settings}),
        "probe",
        survey.vram_budget_bytes,
        required,
        detail=detail,
        peak_allocated_bytes=measured.peak_allocated_bytes if measured.ok else None,
        device=environment.device.partition(":")[0],
        gpu=environment.gpu,
    )
