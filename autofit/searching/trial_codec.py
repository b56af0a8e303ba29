"""Specifications and trials as Optuna stores them.

An Optuna trial has one parameter per setting and `micro_batch`. Its value is samples per second,
to be maximised. Its state follows from the outcome:

* ok -> COMPLETE, constraint at most zero.
* over_budget, retries: it ran and has a speed -> COMPLETE, constraint above zero.
* oom -> PRUNED, constraint above zero: it has no speed, and FAIL would hide it from samplers.
* vetoed -> PRUNED, whatever measurement is recorded for it: it did not run. The constraint is above
  zero, unless the proposal repeats a plan that is known to fit.
* any other outcome without a speed -> FAIL: it says nothing about speed or memory.

Every trial has the constraint, because some samplers refuse a study in which only some have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from autofit.codec import (
    Amount,
    from_json,
    to_json,
    without_controls,
)
from autofit.dimension import check_are_words, forms_of
from autofit.errors import StudyError
from autofit.measurement import Measurement, Outcome, Trial, TrialKind, check_ran
from autofit.plan import Plan
from autofit.planning.search_spec import SearchSpec
from autofit.space import Space

# The study attribute of the specification.
SPEC = "autofit_facts"
MICRO_BATCH = "micro_batch"
# The study attribute of the first trial that the present final comparison may hold.
COMPARED_FROM = "autofit_compared_from"
_RECORD = "autofit_trial"
_CONSTRAINT = "vram"
_MIN_EXCESS = 0.01


def spec_of(study: optuna.Study) -> SearchSpec:
    """Return the specification that a study was made for.

    Raises:
        StudyError: it has none: autofit did not make it.
        InvalidArgument: it is none.
    """
    if SPEC not in study.user_attrs:
        raise StudyError(f"the study {study.study_name!r} was not made by autofit: use another one")
    return SearchSpec.from_json(study.user_attrs[SPEC])


def check_words(spec: SearchSpec, trials: Sequence[Trial]) -> None:
    """Refuse a study whose settings would put more than plain words into code.

    Raises:
        InvalidArgument: there is such a name or value.
    """
    settings = (trial.plan.settings for trial in trials)
    check_are_words(forms_of(spec.space.dimensions), [spec.space.fixed, *settings])


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """Return a space as Optuna parameters: one category per setting, and the micro-batch."""
    settings: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(tuple(dimension.values))
        for name, dimension in space.dimensions.items()
    }
    return settings | {MICRO_BATCH: IntDistribution(1, largest_number(space), log=True)}


def largest_number(space: Space) -> int:
    """Return the upper end of the parameter of the micro-batch."""
    largest = space.largest_micro_batch
    if largest == space.samples_per_rank and space.only_micro_batch is None:
        # Sizes are rounded down to even splits, so many numbers mean the same split. Numbers above
        # the global batch let the unsplit batch be proposed as often, and not by one number alone.
        return 2 * largest - 1
    return largest


def params_of(plan: Plan) -> dict[str, Any]:
    """Return a plan as Optuna parameters."""
    return {**plan.settings, MICRO_BATCH: plan.micro_batch}


def plan_of(params: dict[str, Any], space: Space) -> Plan:
    """Return the plan nearest to the proposed parameters: settings that may not vary are reset."""
    settings = {name: params[name] for name in space.dimensions}
    return space.plan(params[MICRO_BATCH], settings)


def record(study: optuna.Study, asked: optuna.Trial, trial: Trial, spec: SearchSpec) -> None:
    """Store a finished trial, and tell Optuna its value and state."""
    asked.set_constraint(_CONSTRAINT, _excess(trial, spec))
    asked.set_user_attr(_RECORD, to_json(trial))
    study.tell(asked, *_value_and_state(trial))


def trials_in(
    frozen: Sequence[FrozenTrial], compared_from: int, spec: SearchSpec | None = None
) -> tuple[Trial, ...]:
    """Return the recorded trials in order, with Optuna's numbers; lost ones leave gaps.

    So do those in which the workload itself failed. Each ended its search, and whoever resumes it
    may have mended the workload: its baseline is measured again, and nothing is excluded. Trials
    of an earlier final comparison, before `compared_from`, are returned as those of the search.

    Args:
        frozen: the study's.
        compared_from: see above.
        spec: of a study of the user's own, whose trials have no record and are read by their value
            and constraint; None: those are left out.
    """
    compared_from = from_json(compared_from, Amount, "the first trial of the final comparison")
    found = []
    for each in frozen:
        if each.state.is_finished() and _RECORD in each.user_attrs:
            found.append(trial_in(each.number, each.user_attrs[_RECORD]))
        elif spec is not None and (trial := _observed(each, spec)) is not None:
            found.append(trial)
    return compared_before([each for each in found if not each.blames_workload], compared_from)


def compared_before(trials: Sequence[Trial], number: int) -> tuple[Trial, ...]:
    """Return trials; those of a final comparison before that number as ones of the search."""
    return tuple(
        replace(trial, kind=TrialKind.SEARCH)
        if trial.kind is TrialKind.CONFIRMATION and trial.number < number
        else trial
        for trial in trials
    )


def _observed(frozen: FrozenTrial, spec: SearchSpec) -> Trial | None:
    """Return a trial of a study of the user's own, or None if it says nothing of a plan."""
    if not {*spec.space.dimensions, MICRO_BATCH} <= frozen.params.keys():
        return None
    plan, excess = plan_of(frozen.params, spec.space), frozen.constraints.get(_CONSTRAINT)
    is_over = excess is not None and excess > 0
    if frozen.state is TrialState.COMPLETE and frozen.value is not None and frozen.value > 0:
        measurement = Measurement(
            Outcome.OVER_BUDGET if is_over else Outcome.OK,
            step_times_s=(plan.samples_per_step / frozen.value,),
            peak_reserved_bytes=(
                None if excess is None else round((1 + excess) * spec.vram_budget_bytes)
            ),
        )
    elif is_over:
        measurement = Measurement(Outcome.OOM)
    elif frozen.state is TrialState.FAIL:
        measurement = Measurement(Outcome.CRASHED, detail="the trial failed")
    else:
        return None
    return Trial(frozen.number, TrialKind.SEARCH, plan, measurement)


def _value_and_state(trial: Trial) -> tuple[float | None, TrialState]:
    speed, outcome = trial.samples_per_second, trial.measurement.outcome
    if trial.kind is TrialKind.VETOED:
        return None, TrialState.PRUNED
    if speed is not None and outcome.ran:
        return speed, TrialState.COMPLETE
    if outcome.about_memory:
        return None, TrialState.PRUNED
    return None, TrialState.FAIL


def _excess(trial: Trial, spec: SearchSpec) -> float:
    """Return the excess over the budget as a share of it; at most zero if the plan fits."""
    held = trial.measurement.held_bytes
    if held is None:
        held = trial.predicted_peak_bytes
    excess = 0.0 if held is None else held / spec.vram_budget_bytes - 1
    if trial.measurement.outcome is Outcome.OK:
        return min(excess, 0.0)
    return max(excess, _MIN_EXCESS)


def trial_in(number: int, data: dict[str, Any]) -> Trial:
    """Return the trial of a record, which has Optuna's number whatever the record says."""
    trial = from_json(without_controls(data) | {"number": number}, Trial, "the trial")
    if trial.ok and trial.kind is not TrialKind.VETOED:
        check_ran(trial)
    return trial
