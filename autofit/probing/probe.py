"""Run one plan in a worker, for `autofit.probe`, a check and a comparison with a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autofit.errors import InvalidArgument
from autofit.measurement import Trial, TrialKind
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.survey import Survey
from autofit.probing.torchrun import owned_by_rank_0, ranks_meant
from autofit.registry import load_strategies, resolve
from autofit.strategy import Strategy
from autofit.training.loss import STOOD_IN, LossSource
from autofit.training.workload import Workload, check_arguments


def probe_if(
    check: Callable[[Survey], None],
    workload: Workload,
    *,
    plan: Plan | None = None,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    payloads: Mapping[str, Any] | None = None,
    seed: int = 0,
    ranks: int | None = None,
) -> Trial:
    """Run one plan.

    Args:
        check: called with the survey; what it raises is raised before the plan runs.
        payloads: meaning of the plan's settings, by setting, as in a report's dimensions; None: as
            the strategies find it here and now. A setting with a payload may have any value.
        workload, plan, vram_budget, device, strategies, seed, ranks: as for `autofit.probe`.

    Raises:
        Exception: as `autofit.probe` does.
    """
    check_arguments(workload, plan)
    size = ranks_meant(ranks, plan)
    asked, kind = (plan.on(size), TrialKind.SEARCH) if plan else (None, TrialKind.BASELINE)
    chosen = load_strategies(strategies, plan=asked, ranks=size)

    def resolved(survey: Survey) -> ResolvedPlan:
        check(survey)
        return resolve_here(asked, survey, chosen, payloads)

    def run(ranks: int) -> Trial:
        target = Target(device, vram_budget, seed, ranks=ranks)
        return run_one(workload, chosen, target, resolved, kind=kind)[0]

    return owned_by_rank_0(run, ranks=size)


def resolve_here(
    plan: Plan | None,
    survey: Survey,
    strategies: Sequence[Strategy],
    payloads: Mapping[str, Any] | None,
) -> ResolvedPlan:
    """Complete a plan so that it can run where the survey was taken.

    Raises:
        InvalidArgument: a setting or a value that there is not; with what the survey says of it.
    """
    try:
        return resolve(plan, survey.space_for(plan), strategies, payloads)
    except InvalidArgument as error:
        told = [
            note
            for name, value in (plan.settings if plan else {}).items()
            for note in survey.notes
            if note.startswith((f"{name}={value} ", f"{name}: "))
        ]
        raise InvalidArgument("; ".join([str(error), *told])) from None


def run_one(
    workload: Workload,
    strategies: Sequence[Strategy],
    target: Target,
    choose: Callable[[Survey], ResolvedPlan],
    *,
    kind: TrialKind = TrialKind.SEARCH,
    expected_seconds: float | None = None,
    steps: int | None = None,
) -> tuple[Trial, Survey]:
    """Run one plan on a prober of its own; return its trial and the survey that preceded it.

    Args:
        workload: what is trained.
        strategies: those that may have settings in the plan.
        target: where it runs.
        choose: returns the plan to run; what it raises is raised before anything is run.
        kind: of the trial.
        expected_seconds, steps: as for `ProbeRequest`.

    Raises:
        Exception: as `probe` does.
    """
    with open_prober(workload, strategies, target) as prober:
        survey = prober.survey()
        request = ProbeRequest(
            choose(survey), full_accumulation=True, expected_seconds=expected_seconds, steps=steps
        )
        result = prober.probe(request)
    if result.user_exception is not None:
        raise result.user_exception
    measured = result.measurement
    if survey.loss == LossSource.STAND_IN:
        measured = replace(measured, notes=(*measured.notes, STOOD_IN))
    return Trial(0, kind, request.plan, measured), survey
