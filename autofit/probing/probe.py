"""`autofit.probe`: workload in, one trial out. Needs no optimizer of plans, and so no Optuna."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autofit.measurement import Role, Trial
from autofit.plan import Plan
from autofit.probing.isolation import open_prober
from autofit.probing.prober import ProbeRequest, Target, users_error
from autofit.probing.survey import Survey
from autofit.registry import load_strategies, resolve
from autofit.strategy import Strategy
from autofit.training.workload import Workload, check_arguments


def probe(
    workload: Workload,
    *,
    plan: Plan | None = None,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    payloads: Mapping[str, Any] | None = None,
    seed: int = 0,
    isolation: str = "process",
) -> Trial:
    """Run one plan and say what it needs and how fast it is.

    Args:
        workload: what is trained.
        plan: what to run; None: the baseline. Settings it leaves out have their first value.
        vram_budget, device, strategies, seed, isolation: as for `search`.
        payloads: what the plan's settings mean, by setting, as in a report's dimensions; None: what
            the strategies say here and now. A setting that is given a meaning may have any value.

    Returns:
        The trial, whatever its outcome; its accumulation was run in full.

    Raises:
        InvalidRequest: an argument is of another kind, or the plan names a setting or a value
            that there is not.
        DeviceUnavailable: the device is not there.
        Exception: what the user's own code raised, as it was raised.
    """
    check_arguments(workload, plan, payloads)
    target = Target(device, vram_budget, seed, isolation)
    return probe_and_survey(workload, target, plan, strategies, payloads)[0]


def probe_and_survey(
    workload: Workload,
    target: Target,
    plan: Plan | None,
    strategies: Iterable[str | Strategy] | None,
    payloads: Mapping[str, Any] | None,
) -> tuple[Trial, Survey]:
    """Return the trial that `probe` returns, and the survey that preceded it."""
    with open_prober(workload, load_strategies(strategies), target) as prober:
        survey = prober.survey()
        resolved = resolve(plan, survey.space(), prober.strategies, payloads)
        measurement = prober.probe(ProbeRequest(resolved, full_accumulation=True))
        if (error := users_error(prober, measurement)) is not None:
            raise error
    role = Role.BASELINE if plan is None else Role.SEARCH
    return Trial(0, role, resolved.plan, measurement), survey
