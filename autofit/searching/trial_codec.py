"""Facts and trials as Optuna keeps them: the one place that knows how a measurement is told.

An Optuna trial has one parameter per setting and `micro_batch`. Its value is samples per second,
to be maximised. How each outcome is told:

* ok -> COMPLETE, constraint at most zero.
* over_budget, retries: it ran and has a speed -> COMPLETE, constraint above zero.
* oom -> PRUNED, constraint above zero: it carries no speed, and FAIL would hide it from samplers.
* vetoed -> PRUNED, whatever stands for its measurement: it did not run. The constraint is above
  zero, unless the proposal repeats a plan that is known to fit.
* anything else that has no speed -> FAIL: it says nothing about speed or memory.

Every trial has the constraint: some samplers refuse a study where only part of them have.
"""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from autofit.errors import StudyRefused
from autofit.measurement import Outcome, Role, Trial
from autofit.plan import Plan
from autofit.planning.search_spec import SearchSpec
from autofit.space import Space

SPEC = "autofit_facts"
"""The study attribute that holds the spec of the search."""
MICRO_BATCH = "micro_batch"
_RECORD = "autofit_trial"
_CONSTRAINT = "vram"
_LEAST_EXCESS = 0.01


def spec_of(study: optuna.Study) -> SearchSpec:
    """The spec that a study was made with.

    Raises:
        StudyRefused: the study has none: it is not of this project.
    """
    if SPEC not in study.user_attrs:
        raise StudyRefused(f"the study {study.study_name!r} has no spec of a search of autofit's")
    return SearchSpec.from_dict(study.user_attrs[SPEC])


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The search space as Optuna sees it: one category per setting, and the micro-batch."""
    settings: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(tuple(dimension.values))
        for name, dimension in space.dimensions.items()
    }
    largest = space.largest_micro_batch
    if largest == space.global_batch and space.only_micro_batch is None:
        # Sizes are rounded down to whole splits: so is what lies above the whole batch, which a
        # sampler would else hit by that one number alone.
        largest = 2 * largest - 1
    return settings | {MICRO_BATCH: IntDistribution(1, largest, log=True)}


def params_of(plan: Plan) -> dict[str, Any]:
    """A plan as Optuna parameters."""
    return {**plan.settings, MICRO_BATCH: plan.micro_batch}


def plan_of(params: dict[str, Any], space: Space) -> Plan:
    """The plan nearest to what a sampler asked for: settings that may not vary are put back."""
    settings = {name: params[name] for name in space.dimensions}
    for name, dimension in space.dimensions.items():
        if not dimension.allowed_with(settings):
            settings[name] = dimension.values[0]
    return space.plan(params[MICRO_BATCH], settings)


def record(study: optuna.Study, asked: optuna.Trial, trial: Trial, spec: SearchSpec) -> Trial:
    """Store a finished trial, tell Optuna its state, and return it as `trials_of` numbers it."""
    asked.set_constraint(_CONSTRAINT, _excess(trial, spec))
    asked.set_user_attr(_RECORD, trial.to_dict())
    study.tell(asked, *_value_and_state(trial))
    place = [frozen.number for frozen in _recorded(study)].index(asked.number)
    return trials_of(study)[place]


def finish_recorded(study: optuna.Study, frozen: FrozenTrial) -> bool:
    """Tell the state of a trial that was recorded but not told; False where it was not recorded."""
    if _RECORD not in frozen.user_attrs:
        return False
    study.tell(frozen.number, *_value_and_state(_trial(0, frozen.user_attrs[_RECORD])))
    return True


def trials_of(study: optuna.Study) -> tuple[Trial, ...]:
    """Every recorded trial in order, numbered from 0; unfinished and lost ones are left out."""
    records = [frozen.user_attrs[_RECORD] for frozen in _recorded(study)]
    return tuple(_trial(number, data) for number, data in enumerate(records))


def _recorded(study: optuna.Study) -> list[FrozenTrial]:
    finished = [t for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
    return [t for t in finished if _RECORD in t.user_attrs]


def _value_and_state(trial: Trial) -> tuple[float | None, TrialState]:
    speed, outcome = trial.samples_per_second, trial.measurement.outcome
    if trial.role is Role.VETOED:
        return None, TrialState.PRUNED
    if speed is not None and outcome in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.RETRIES):
        return speed, TrialState.COMPLETE
    if outcome.about_memory:
        return None, TrialState.PRUNED
    return None, TrialState.FAIL


def _excess(trial: Trial, spec: SearchSpec) -> float:
    """By which share of the budget the plan is over it; at most zero where it fits."""
    held = trial.measurement.held_bytes
    if held is None:
        held = trial.predicted_peak_bytes
    excess = 0.0 if held is None else held / spec.vram_budget_bytes - 1
    if trial.measurement.outcome is Outcome.OK:
        return min(excess, 0.0)
    return max(excess, _LEAST_EXCESS)


def _trial(number: int, data: dict[str, Any]) -> Trial:
    """The trial of that record; older studies keep its measurement apart."""
    return Trial.from_dict({**data, **data.get("measurement", {}), "number": number})
