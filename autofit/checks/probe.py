"""`autofit.probe`: run one plan."""

from __future__ import annotations

from collections.abc import Iterable

from autofit.checks.tuned import AskedPlan
from autofit.errors import hides_own_frames
from autofit.measurement import Trial
from autofit.plan import Plan
from autofit.probing.probe import probe_if
from autofit.report.report import Report
from autofit.strategy import Strategy
from autofit.training.workload import Workload


@hides_own_frames
def probe(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    seed: int = 0,
    ranks: int | None = None,
) -> Trial:
    """Run one plan for a few optimizer steps and return what it needs and how fast it is.

    Args:
        workload: what is trained.
        plan: what to run, or a report, whose recommended plan is run; None: the baseline. Settings
            that a plan leaves out are at their default.
        vram_budget: as for `search`.
        device: one device, as for `search`.
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
    return probe_if(
        lambda survey: asked.check_same_model(survey.parameters, workload),
        workload,
        plan=asked.plan,
        vram_budget=vram_budget,
        device=device,
        strategies=strategies,
        payloads=asked.payloads,
        seed=seed,
        ranks=ranks,
    )
