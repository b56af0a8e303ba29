"""The planner as an Optuna sampler, and how trials are stored in Optuna."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autofit.errors import InvalidArgument
from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Dimension
from autofit.planning import planner
from autofit.planning.beliefs import Beliefs
from autofit.searching import trial_codec
from autofit.searching.engine import run_search
from autofit.searching.sampler import Sampler
from autofit.searching.study import Store
from tests.simulated import MakeDevice, SimulatedDevice


def test_any_process_with_the_study_asks_for_the_planners_plan(device: SimulatedDevice) -> None:
    with Store.open(None, {}) as store:
        run_search(device.prober(), device.spec(), store=store, max_probes=4)
        store.study.sampler = Sampler()
        asked = store.study.ask(trial_codec.distributions(device.space))
        decided = planner.decide(Beliefs(device.spec(), store.trials))
        assert isinstance(decided, planner.Proposal)
    assert asked.params == trial_codec.params_of(decided.plan)


def test_a_finished_planner_repeats_the_best_plan(make_device: MakeDevice) -> None:
    small = make_device(dimensions={}, max_micro_batch=4)
    with Store.open(None, {}) as store:
        result = run_search(small.prober(), small.spec(), store=store)
        decided = planner.decide(Beliefs(small.spec(), store.trials))
        assert isinstance(decided, planner.NothingLeft)
        store.study.sampler = Sampler()
        asked = store.study.ask(trial_codec.distributions(small.space))
    assert asked.params == trial_codec.params_of(result.best.plan)


def test_a_plan_has_no_other_parameters(device: SimulatedDevice) -> None:
    with Store.open(None, {}) as store:
        store.begin(device.spec())
        store.study.sampler = Sampler()
        with pytest.raises(InvalidArgument, match="learning_rate"):
            store.study.ask().suggest_float("learning_rate", 0, 1)


RAN: dict[str, Any] = {"step_times_s": [0.1], "peak_reserved_bytes": 2**30}
HUGE = RAN | {"peak_reserved_bytes": 2**40}


@pytest.mark.parametrize(
    ("measurement", "state", "feasible"),
    [
        (Measurement(Outcome.OK, **RAN), "COMPLETE", True),
        (Measurement(Outcome.OVER_BUDGET, **HUGE), "COMPLETE", False),
        (Measurement(Outcome.RETRIES, **RAN), "COMPLETE", False),
        (Measurement(Outcome.OOM), "PRUNED", False),
        (Measurement(Outcome.CRASHED), "FAIL", False),
    ],
    ids=str,
)
def test_each_outcome_has_its_state_and_constraint(
    device: SimulatedDevice, measurement: Measurement, state: str, feasible: bool
) -> None:
    with Store.open(None, {}) as store:
        store.begin(device.spec())
        asked = store.ask(device.space.baseline)
        trial = Trial(asked.number, TrialKind.BASELINE, device.space.baseline, measurement)
        store.record(asked, trial)
        (frozen,) = store.study.trials
        assert store.trials == (trial,) == trial_codec.trials_in([frozen], 0)
    assert frozen.state is TrialState[state]
    assert [value <= 0 for value in frozen.constraints.values()] == [feasible]


def test_a_trial_keeps_its_number_when_another_finishes_first(device: SimulatedDevice) -> None:
    plan = device.space.baseline
    ok = Measurement(Outcome.OK, step_times_s=[0.1], peak_reserved_bytes=2**30)
    with Store.open(None, {}) as store:
        store.begin(device.spec())
        first, second = store.ask(plan), store.ask(plan)
        later = Trial(second.number, TrialKind.SEARCH, plan, ok)
        earlier = Trial(first.number, TrialKind.BASELINE, plan, ok)
        store.record(second, later)
        assert list(store.trials) == [later]
        store.record(first, earlier)
        assert list(store.trials) == [earlier, later]
    assert (earlier.number, later.number) == (0, 1)


def test_what_depends_on_a_setting_that_is_reset_is_reset_too(make_device: MakeDevice) -> None:
    dimensions = {
        "first": Dimension((0, 1), when={"second": [1]}),
        "second": Dimension((0, 1), when={"third": [1]}),
        "third": Dimension((0, 1)),
    }
    space = make_device(dimensions=dimensions).space
    for settings in ({"third": 0}, {"third": 1}):
        params = {"first": 1, "second": 1, "micro_batch": 8, **settings}
        assert trial_codec.plan_of(params, space).settings in list(space.variants())


def _study_of(device: SimulatedDevice, seed: int = 0) -> tuple[Sampler, optuna.Study]:
    sampler = Sampler(
        device.space.dimensions,
        sample_batch_size=device.space.sample_batch_size,
        vram_budget=device.budget,
        max_micro_batch=device.space.max_micro_batch,
        seed=seed,
    )
    return sampler, optuna.create_study(direction="maximize", sampler=sampler)


def _objective(sampler: Sampler, device: SimulatedDevice) -> Callable[[optuna.Trial], float]:
    def speed(trial: optuna.Trial) -> float:
        plan = sampler.suggest(trial)
        excess = device.memory(plan) / device.budget - 1
        trial.set_constraint("vram", excess)
        if excess > 0:
            raise optuna.TrialPruned
        return device.speed(plan)

    return speed


@pytest.mark.slow
def test_a_study_of_the_users_own_ends_at_the_fastest_plan(device: SimulatedDevice) -> None:
    sampler, study = _study_of(device)
    study.optimize(_objective(sampler, device), n_trials=60)
    first, *_ = study.trials
    assert trial_codec.plan_of(first.params, device.space) == device.space.baseline
    assert len(study.trials) < 30  # it stopped the study
    assert study.best_value >= 0.97 * device.optimum()


def test_a_study_of_the_users_own_goes_on_with_a_new_sampler(device: SimulatedDevice) -> None:
    sampler, study = _study_of(device)
    study.optimize(_objective(sampler, device), n_trials=4)
    fresh, _ = _study_of(device)
    plans = [each.suggest(_asked_of(study, each)) for each in (sampler, fresh)]
    assert plans[0] == plans[1]


def _asked_of(study: optuna.Study, sampler: Sampler) -> optuna.Trial:
    study.sampler = sampler
    asked = study.ask()
    sampler.suggest(asked)
    study.tell(asked, state=TrialState.PRUNED)  # nothing is known of it
    return asked


def test_plans_in_flight_are_not_proposed_again(device: SimulatedDevice) -> None:
    sampler, study = _study_of(device)
    study.optimize(_objective(sampler, device), n_trials=3)
    plans = [sampler.suggest(study.ask()) for _ in range(3)]
    assert len(set(plans)) == 3


def test_settings_that_fail_are_left_alone(device: SimulatedDevice) -> None:
    sampler, study = _study_of(device)
    name, dimension = next(iter(device.space.dimensions.items()))
    bad = dimension.values[1]

    def speed(trial: optuna.Trial) -> float:
        plan = sampler.suggest(trial)
        if plan.settings[name] == bad:
            raise RuntimeError("not on this device")
        return device.speed(plan)

    study.optimize(speed, n_trials=12, catch=RuntimeError)
    assert [t.params[name] == bad for t in study.trials].count(True) <= 2
    assert len(study.trials) > 4


def test_a_study_that_minimizes_is_refused(device: SimulatedDevice) -> None:
    sampler, _ = _study_of(device)
    study = optuna.create_study(sampler=sampler)
    with pytest.raises(InvalidArgument, match="maximize"):
        sampler.suggest(study.ask())
