"""`autofit.probe`: workload in, one trial out. Needs no optimizer of plans, and so no Optuna."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from autofit.measurement import Role, Trial
from autofit.plan import Plan
from autofit.probing.isolation import open_prober
from autofit.probing.prober import ProbeRequest, users_error
from autofit.probing.survey import Survey
from autofit.registry import load_strategies
from autofit.space import Space
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
    return probe_and_survey(
        workload,
        plan,
        strategies,
        payloads,
        device=device,
        vram_budget=vram_budget,
        seed=seed,
        isolation=isolation,
    )[0]


def probe_and_survey(
    workload: Workload,
    plan: Plan | None,
    strategies: Iterable[str | Strategy] | None,
    payloads: Mapping[str, Any] | None,
    **where: Any,
) -> tuple[Trial, Survey]:
    """What `probe` returns, and the survey that it was run after; `where` is for `open_prober`."""
    chosen = load_strategies(strategies)
    with open_prober(workload, chosen, **where) as prober:
        survey = prober.survey()
        space, names = survey.space(), [strategy.name for strategy in chosen]
        complete, meanings = _completed(plan, space, payloads or {}, names)
        measurement = prober.probe(
            ProbeRequest(complete, payloads=meanings, full_accumulation=True)
        )
        if (error := users_error(prober, measurement)) is not None:
            raise error
    role = Role.BASELINE if plan is None else Role.SEARCH
    return Trial(0, role, complete, measurement), survey


def _completed(
    plan: Plan | None, space: Space, payloads: Mapping[str, Any], strategies: Container[str]
) -> tuple[Plan, dict[str, Any]]:
    """The plan with all its settings, and what they mean: as given, else as the space has it."""
    if plan is None:
        return space.baseline, space.payloads(space.plain_settings)
    given = {
        name: payload
        for name, payload in payloads.items()
        if name in plan.settings and name.partition(".")[0] in strategies
    }
    told = space.complete({n: v for n, v in plan.settings.items() if n not in given})
    meanings = {**space.payloads(told), **given}
    return replace(plan, settings={**told, **plan.settings}), meanings
