"""`autofit.probe`: run one plan; or a report's best plan for longer, to see whether it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import overload

from autofit.checks.soak import SoakResult, soak
from autofit.checks.tuned import AskedPlan
from autofit.errors import hides_own_frames
from autofit.measurement import Trial
from autofit.plan import Plan
from autofit.probing.probe import probe_if
from autofit.report.report import Report
from autofit.strategy import Strategy
from autofit.training.workload import Workload


@overload
def probe(
    workload: Workload,
    *,
    plan: Report,
    steps: int,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    seed: int = 0,
    ranks: int | None = None,
) -> SoakResult: ...


@overload
def probe(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    steps: int | None = None,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    seed: int = 0,
    ranks: int | None = None,
) -> Trial: ...


@hides_own_frames
def probe(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    steps: int | None = None,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    seed: int = 0,
    ranks: int | None = None,
) -> Trial:
    """Run one plan and return what it needs and how fast it is.

    With a report and steps=200 its best plan trains for that long, within the report's budget, and
    the `SoakResult` says how peak, speed and loss compare with the report.

    Args:
        workload: what is trained.
        plan: what to run, or a report, whose best plan is run; None: the baseline. Settings that
            a plan leaves out are at their default.
        steps: timed optimizer steps; None: as many as a search times.
        vram_budget: as for `search`; None with a report and steps: the report's.
        device: one device, as for `search`; None with a report and steps: the report's.
        strategies: as for `search`.
        seed: of everything random.
        ranks: workers that train the model together, each on a GPU of its own or all on the CPU; if
            None, as many as the plan says or torchrun started.

    Returns:
        The trial, whatever its outcome; its accumulation was run in full.

    Raises:
        InvalidArgument: an argument is of another kind, the plan names a setting or a value that
            does not exist here, or the report is of another workload.
        DeviceUnavailable: the device is not there.
        WorkerFailed: the worker ended or hung before the plan ran.
        Exception: what the user's own code raised, as it was raised.
    """
    asked = AskedPlan.read(workload, plan)
    if asked.record is not None and steps is not None:
        known = plan.strategies if isinstance(plan, Report) else ()
        return soak(asked.record, workload, steps, device, vram_budget, known)
    return probe_if(
        lambda survey: asked.check_same_model(survey.parameters, workload),
        workload,
        plan=asked.plan,
        steps=steps,
        vram_budget=vram_budget,
        device=device,
        strategies=strategies,
        payloads=asked.payloads,
        seed=seed,
        ranks=ranks,
    )
