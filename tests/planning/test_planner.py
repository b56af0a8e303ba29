"""The planner: its decisions, and that they depend on specification and trials alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autofit.measurement import Measurement, Outcome, TrialKind
from autofit.plan import Dimension, Plan, Settings
from autofit.planning import planner
from autofit.planning.beliefs import Beliefs
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB
from tests.planning.conftest import Searched
from tests.simulated import (
    DIMENSIONS,
    MakeDevice,
    SimulatedDevice,
    make_trial,
    with_predicted_lines,
)


def test_a_decision_depends_on_specification_and_trials_alone(
    device: SimulatedDevice, searched: Searched
) -> None:
    spec, trials = device.spec(), searched[0].trials[:5]
    again = SearchSpec.from_json(spec.to_json())
    for count in range(1, len(trials)):
        first = planner.decide(Beliefs(spec, trials[:count]))
        assert planner.decide(Beliefs(again, trials[:count])) == first


def test_vetoed_trials_change_no_decision(device: SimulatedDevice, searched: Searched) -> None:
    trials = searched[0].trials[:4]
    vetoed = replace(trials[1], kind=TrialKind.VETOED, measurement=Measurement(Outcome.OVER_BUDGET))
    before = Beliefs(device.spec(), trials)
    assert before.updated((*trials, vetoed)) is before
    assert planner.decide(Beliefs(device.spec(), (*trials, vetoed))) == planner.decide(before)
    assert before.updated(trials[:-1]).probes == list(trials[:-1])


def test_it_finds_the_best_plan_with_few_probes_and_no_oom(
    device: SimulatedDevice, searched: Searched
) -> None:
    result, _ = searched
    assert device.speed(result.best.plan) >= 0.97 * device.optimum()
    assert result.search.oom_probes == 0
    assert result.search.probes <= 20


def test_no_step_is_longer_than_six_times_the_largest_measured(searched: Searched) -> None:
    largest = 0
    for request in searched[1]:
        assert largest == 0 or request.plan.micro_batch <= 6 * largest
        largest = max(largest, request.plan.micro_batch)


def _probed(device: SimulatedDevice, max_probes: int | None = None) -> list[Any]:
    prober = device.prober()
    run_search(prober, device.spec(), max_probes=max_probes)
    return prober.probed


def test_costly_values_are_tried_last_and_on_leaders_only(make_device: MakeDevice) -> None:
    costly = Dimension((False, True), trial_cost_s=30.0)
    other = make_device(
        dimensions={
            "precision.dtype": Dimension(("default", "bfloat16")),
            "checkpointing.level": Dimension((0, 1, 2)),
            "compile.model": costly,
        }
    )
    requests = [r for r in _probed(other) if not r.full_accumulation]
    compiled = [bool(r.plan.settings["compile.model"]) for r in requests]
    assert any(compiled)
    for at, request in enumerate(requests):
        cheap = [dict(r.plan.variant) for r in requests[:at]]
        assert not compiled[at] or {**request.plan.settings, "compile.model": False} in cheap


def test_a_costly_value_is_tried_where_nothing_fits_without_it() -> None:
    space = Space(
        {"offload.activations": Dimension((False, True), trial_cost_s=1.0)}, 4, max_micro_batch=64
    )

    def held(plan: Plan) -> float:
        return (1.0 if plan.settings["offload.activations"] else 30.0) * GIB * plan.micro_batch

    prober = SimulatedProber(8 * GIB, held, lambda plan: 0.1 + 0.01 * plan.micro_batch)
    best = run_search(prober, SearchSpec(space, 8 * GIB)).best.plan
    assert best.settings["offload.activations"]
    assert best.micro_batch in (7, 8)


def test_with_a_global_batch_every_plan_keeps_it(make_device: MakeDevice) -> None:
    other = make_device(global_batch=50)
    prober = other.prober()
    result = run_search(prober, other.spec())
    for request in prober.probed:
        assert request.plan.global_batch == 50
        assert sum(request.plan.micro_batch_sizes) == 50
    assert other.speed(result.best.plan) >= 0.97 * other.optimum()


def test_a_split_that_may_not_change_leaves_one_geometry(make_device: MakeDevice) -> None:
    other = make_device(global_batch=50, may_change_accumulation=False)
    splits = {r.plan.accumulation_steps for r in _probed(other, 8)}
    assert splits == {other.space.baseline.accumulation_steps}


def test_the_largest_micro_batch_is_kept(make_device: MakeDevice) -> None:
    assert max(r.plan.micro_batch for r in _probed(make_device(max_micro_batch=9), 8)) <= 9


@pytest.mark.parametrize("most_changed", [1, 2], ids=["one setting at a time", "every variant"])
def test_with_predicted_lines_the_first_step_is_foreseen(
    make_device: MakeDevice, most_changed: int
) -> None:
    other = make_device(sample_batch_size=1)
    spec = with_predicted_lines(other, most_changed=most_changed)
    trials = run_search(other.prober(), spec, max_probes=2).trials[:1]
    decided: Any = planner.decide(Beliefs(spec, trials))
    expected = planner.forecast(Beliefs(spec, ()), decided.plan).peak_bytes
    assert expected == pytest.approx(other.memory(decided.plan), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "cause"), [(1, "memory"), (3, "size limit"), (100, "memory"), (4000, "size limit")]
)
def test_a_hidden_limit_is_found_within_six_failures(limit: int, cause: str) -> None:
    """Neither is on a memory line: of memory, a jump beyond the limit is taken out."""
    space = Space({"a.x": Dimension(("off", "on"))}, sample_batch_size=1, max_micro_batch=4096)
    prober = SimulatedProber(
        10**11,
        lambda plan: (
            1e6 * plan.micro_batch + 1e12 * (cause == "memory") * (plan.micro_batch > limit)
        ),
        lambda plan: 1e-3 * (60 + plan.micro_batch),
        size_limit=(lambda plan: limit) if cause == "size limit" else None,
        time_noise=0.005,
    )
    result = run_search(prober, SearchSpec(space, 10**11))
    assert sum(not trial.ok for trial in result.trials) <= 6
    best = result.best.plan.micro_batch
    assert best / (60 + best) >= 0.95 * limit / (60 + limit)


def _compiling(make_device: MakeDevice, **costs: Any) -> SimulatedDevice:
    """A device on which nothing is to choose but what is compiled."""
    return make_device(dimensions={"compile.mode": Dimension(("off", "whole", "parts"), **costs)})


@pytest.mark.parametrize(("samples", "tried"), [(1_000, False), (10_000_000, True)])
def test_a_costly_value_is_tried_where_the_training_is_long_enough(
    make_device: MakeDevice, samples: int, tried: bool
) -> None:
    other = _compiling(make_device, trial_cost_s=30.0)
    spec = replace(other.spec(), planned_samples=samples)
    result = run_search(other.prober(), spec)
    assert any(t.plan.settings["compile.mode"] != "off" for t in result.trials) is tried
    assert SearchSpec.from_json(spec.to_json()).planned_samples == samples


def test_no_costly_value_is_tried_that_the_time_does_not_suffice_for(
    make_device: MakeDevice,
) -> None:
    other = _compiling(make_device, trial_cost_s=30.0)
    spec, cheap = other.spec(), replace(other.spec(), planned_samples=1_000)
    beliefs = Beliefs(spec, run_search(other.prober(), cheap).trials)
    assert isinstance(planner.decide(beliefs, seconds_left=29.0), planner.NothingLeft)
    decided: Any = planner.decide(beliefs, seconds_left=31.0)
    assert decided.plan.settings["compile.mode"] != "off"


def test_the_start_of_a_costly_plan_counts_over_the_training(make_device: MakeDevice) -> None:
    other = _compiling(make_device, trial_cost_s=30.0)
    trials = run_search(other.prober(), other.spec()).trials
    started = [
        replace(t, measurement=replace(t.measurement, start_up_s=50.0))
        if t.plan.settings["compile.mode"] != "off"
        else t
        for t in trials
    ]
    plan = next(t.plan for t in started if t.plan.settings["compile.mode"] != "off")
    unknown = Beliefs(other.spec(), started).mean_log_speed(plan)
    for samples in (1_000, 1_000_000):
        spec = replace(other.spec(), planned_samples=samples)
        seconds = samples / math.exp(unknown) + 50.0
        counted = Beliefs(spec, started).mean_log_speed(plan)
        assert math.exp(counted) == pytest.approx(samples / seconds)


def test_a_warm_start_counts_where_one_was_measured(make_device: MakeDevice) -> None:
    other = _compiling(make_device, trial_cost_s=30.0)
    trials = run_search(other.prober(), other.spec()).trials
    compiled = next(t for t in trials if t.plan.settings["compile.mode"] != "off")
    spec = replace(other.spec(), planned_samples=10_000)
    for is_warm, counted_s in ((False, 50.0), (True, 5.0)):
        starts = [
            replace(
                compiled,
                measurement=replace(compiled.measurement, start_up_s=seconds, start_is_warm=warm),
            )
            for seconds, warm in ((50.0, False), (5.0, is_warm))
        ]
        beliefs = Beliefs(spec, [*trials, *starts])
        assert beliefs.start_up_s[beliefs.index(compiled.plan)] == counted_s


def test_what_a_cold_start_took_tells_what_others_of_the_setting_take(
    make_device: MakeDevice,
) -> None:
    dimensions = {
        "compile.mode": Dimension(
            ("off", "parts", "whole"), trial_costs_s={"parts": 20.0, "whole": 50.0}
        ),
        "offload.on": Dimension((False, True), trial_cost_s=4.0),
    }
    device = make_device(dimensions=dimensions)
    off: Settings = {"compile.mode": "off", "offload.on": False}
    parts: Settings = {**off, "compile.mode": "parts"}
    for is_warm, factor in ((False, 0.4), (True, 1.0), (None, 1.0)):
        trials = [
            make_trial(0, Plan(4, settings=off), step_times_s=[0.1]),
            make_trial(
                1,
                Plan(4, settings=parts),
                step_times_s=[0.1],
                start_up_s=8.0,
                start_is_warm=is_warm,
            ),
        ]
        beliefs = Beliefs(device.spec(), trials)
        costs_s = dict(zip(map(str, beliefs.variants), beliefs.trial_costs_s.tolist(), strict=True))
        whole = {**off, "compile.mode": "whole"}
        assert costs_s[str(whole)] == pytest.approx(50.0 * factor)
        assert costs_s[str({**off, "offload.on": True})] == pytest.approx(4.0)


@pytest.mark.parametrize("start_up_s", [None, 2.0])
def test_a_later_cold_start_that_took_less_or_was_not_timed_makes_none_cheap(
    make_device: MakeDevice, start_up_s: float | None
) -> None:
    """Of a loss that was not finite in the warm-up nothing is timed; parts may be cached."""
    device = _compiling(make_device, trial_cost_s=30.0)
    first, *_ = (v for v in Beliefs(device.spec(), []).variants if v["compile.mode"] != "off")
    outcome = Outcome.NONFINITE if start_up_s is None else Outcome.OK
    cold: dict[str, Any] = {"start_is_warm": False}
    trials = [
        make_trial(0, Plan(4, settings=first), step_times_s=[0.1], start_up_s=60.0, **cold),
        make_trial(1, Plan(8, settings=first), outcome, start_up_s=start_up_s, **cold),
    ]
    beliefs = Beliefs(device.spec(), trials)
    assert beliefs.trial_costs_s[beliefs.index(trials[0].plan)] == pytest.approx(60.0)
    alone = Beliefs(device.spec(), trials[1:])
    assert alone.trial_costs_s[alone.index(trials[1].plan)] == (start_up_s or 30.0)


def test_settings_that_forbid_accumulation_are_probed_in_one_micro_batch(
    make_device: MakeDevice,
) -> None:
    name = "update.when"
    whole = {**DIMENSIONS, name: Dimension(("step", "backward"), accumulation={"backward": False})}
    device = make_device(dimensions=whole, global_batch=24)
    result = run_search(device.prober(), device.spec())
    assert {trial.plan.accumulation_steps for trial in result.trials} > {1}
    chosen = [trial.plan for trial in result.trials if trial.plan.settings[name] == "backward"]
    assert chosen
    assert all(plan.accumulation_steps == 1 for plan in chosen)
