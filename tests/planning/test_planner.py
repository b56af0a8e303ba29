"""The planner: its decisions, and that they depend on specification and trials alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Dimension, Plan, Settings
from autofit.planning import planner
from autofit.planning.beliefs import Beliefs
from autofit.planning.planner import believing
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
    measured,
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


@pytest.mark.parametrize(
    ("space", "keeps"),
    [
        ({"max_micro_batch": 9}, lambda plan: plan.micro_batch <= 9),
        ({"global_batch": 50}, lambda plan: sum(plan.micro_batch_sizes) == 50),
        (
            {"global_batch": 50, "may_change_accumulation": False},
            lambda plan: plan.accumulation_steps == 13,
        ),
    ],
)
def test_every_plan_keeps_what_the_space_fixes(
    make_device: MakeDevice, space: dict[str, Any], keeps: Callable[[Plan], bool]
) -> None:
    device = make_device(**space)
    result = run_search(device.prober(), device.spec(), max_probes=8)
    assert all(keeps(trial.plan) for trial in result.trials)


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


MODE = "compile.mode"


def _compiling(**costs: Any) -> SimulatedDevice:
    """A device on which nothing is to choose but what is compiled."""
    dimensions = {MODE: Dimension(("off", "whole", "parts"), **costs)}
    return SimulatedDevice(Space(dimensions, sample_batch_size=4))


@pytest.fixture(scope="module")
def compiling() -> tuple[SimulatedDevice, Sequence[Trial], Trial]:
    """A device on which compiling costs 30 s, the trials of a search, and one that compiled."""
    device = _compiling(trial_cost_s=30.0)
    trials = run_search(device.prober(), device.spec()).trials
    return device, trials, next(t for t in trials if t.plan.settings[MODE] != "off")


Compiling: TypeAlias = tuple[SimulatedDevice, Sequence[Trial], Trial]


def test_a_costly_value_is_tried_where_the_training_and_the_time_are_long_enough(
    compiling: Compiling,
) -> None:
    device, _, _ = compiling
    spec = replace(device.spec(), planned_samples=1_000)
    assert SearchSpec.from_json(spec.to_json()).planned_samples == 1_000
    cheap = run_search(device.prober(), spec).trials
    assert {trial.plan.settings[MODE] for trial in cheap} == {"off"}
    beliefs = Beliefs(device.spec(), cheap)
    assert isinstance(planner.decide(beliefs, seconds_left=29.0), planner.NothingLeft)
    decided: Any = planner.decide(beliefs, seconds_left=31.0)
    assert decided.plan.settings[MODE] != "off"


@pytest.mark.parametrize("samples", [1_000, 1_000_000])
def test_the_start_of_a_costly_plan_counts_over_the_training(
    compiling: Compiling, samples: int
) -> None:
    device, trials, compiled = compiling
    started = [
        replace(t, measurement=replace(t.measurement, start_up_s=50.0))
        if t.plan.settings[MODE] != "off"
        else t
        for t in trials
    ]
    unknown = Beliefs(device.spec(), started).mean_log_speed(compiled.plan)
    counted = Beliefs(replace(device.spec(), planned_samples=samples), started)
    expected = samples / (samples / math.exp(unknown) + 50.0)
    assert math.exp(counted.mean_log_speed(compiled.plan)) == pytest.approx(expected)


@pytest.mark.parametrize(("is_warm", "counted_s"), [(False, 50.0), (True, 5.0)])
def test_a_warm_start_counts_where_one_was_measured(
    compiling: Compiling, is_warm: bool, counted_s: float
) -> None:
    device, trials, compiled = compiling
    starts = [
        replace(
            compiled,
            measurement=replace(compiled.measurement, start_up_s=seconds, start_is_warm=warm),
        )
        for seconds, warm in ((50.0, False), (5.0, is_warm))
    ]
    spec = replace(device.spec(), planned_samples=10_000)
    beliefs = Beliefs(spec, [*trials, *starts])
    assert beliefs.start_up_s[beliefs.index(compiled.plan)] == counted_s


@pytest.mark.parametrize(("is_warm", "factor"), [(False, 0.4), (True, 1.0), (None, 1.0)])
def test_what_a_cold_start_took_tells_what_others_of_the_setting_take(
    make_device: MakeDevice, is_warm: bool | None, factor: float
) -> None:
    costs_s: Any = {"parts": 20.0, "whole": 50.0}
    dimensions = {
        MODE: Dimension(("off", "parts", "whole"), trial_costs_s=costs_s),
        "offload.on": Dimension((False, True), trial_cost_s=4.0),
    }
    device = make_device(dimensions=dimensions)
    off: Settings = {MODE: "off", "offload.on": False}
    start: dict[str, Any] = {"start_up_s": 8.0, "start_is_warm": is_warm}
    trials = [
        make_trial(0, Plan(4, settings=off), step_times_s=[0.1]),
        make_trial(1, Plan(4, settings={**off, MODE: "parts"}), step_times_s=[0.1], **start),
    ]
    beliefs = Beliefs(device.spec(), trials)
    whole, on = (
        beliefs.trial_costs_s[beliefs.index(Plan(4, settings={**off, **changed}))]
        for changed in ({MODE: "whole"}, {"offload.on": True})
    )
    assert whole == pytest.approx(50.0 * factor)
    assert on == pytest.approx(4.0)


@pytest.mark.parametrize("start_up_s", [None, 2.0])
def test_a_later_cold_start_that_took_less_or_was_not_timed_makes_none_cheap(
    start_up_s: float | None,
) -> None:
    """Of a loss that was not finite in the warm-up nothing is timed; parts may be cached."""
    spec, whole = _compiling(trial_cost_s=30.0).spec(), {MODE: "whole"}
    outcome = Outcome.NONFINITE if start_up_s is None else Outcome.OK
    cold: dict[str, Any] = {"start_is_warm": False}
    trials = [
        make_trial(0, Plan(4, settings=whole), step_times_s=[0.1], start_up_s=60.0, **cold),
        make_trial(1, Plan(8, settings=whole), outcome, start_up_s=start_up_s, **cold),
    ]
    both, alone = Beliefs(spec, trials), Beliefs(spec, trials[1:])
    assert both.trial_costs_s[both.index(trials[0].plan)] == pytest.approx(60.0)
    assert alone.trial_costs_s[alone.index(trials[1].plan)] == (start_up_s or 30.0)


def test_settings_that_forbid_accumulation_are_probed_in_one_micro_batch(
    make_device: MakeDevice,
) -> None:
    name = "update.when"
    whole = {**DIMENSIONS, name: Dimension(("step", "backward"), accumulation={"backward": False})}
    device = make_device(dimensions=whole, global_batch=24)
    plans = [trial.plan for trial in run_search(device.prober(), device.spec()).trials]
    steps = {"step": set[int](), "backward": set[int]()}
    for plan in plans:
        steps[str(plan.settings[name])].add(plan.accumulation_steps)
    assert steps["step"] > {1}
    assert steps["backward"] == {1}


# -- What is believed of plans that other workers are running.


def _believing(beliefs: Beliefs, *plans: Plan) -> Beliefs:
    return believing(beliefs, [(plan, TrialKind.SEARCH) for plan in plans])


def test_a_plan_in_flight_is_not_proposed_again(device: SimulatedDevice) -> None:
    beliefs = Beliefs(device.spec(), measured(device, [device.space.baseline]))
    in_flight: list[Plan] = []
    for _ in range(4):
        decided: Any = planner.decide(_believing(beliefs, *in_flight))
        in_flight.append(decided.plan)
    assert len(set(in_flight)) == 4


def test_a_belief_opens_no_larger_stride(make_device: MakeDevice) -> None:
    """Of 4 samples measured the next are at most 24, whatever is believed of 16."""
    device = make_device(dimensions={})
    larger = device.space.plan(16, {})
    beliefs = Beliefs(device.spec(), measured(device, [device.space.baseline]))
    believed = _believing(beliefs, larger)
    assert believed.largest.tolist() == [16]
    assert beliefs.reach.tolist() == believed.reach.tolist() == [24]
    both = Beliefs(device.spec(), measured(device, [device.space.baseline, larger]))
    assert both.reach.tolist() > [24]


def test_while_nothing_fits_workers_try_different_variants(device: SimulatedDevice) -> None:
    beliefs = Beliefs(device.spec(), [make_trial(0, device.space.baseline, Outcome.OOM)])
    first: Any = planner.decide(beliefs)
    second: Any = planner.decide(_believing(beliefs, first.plan))
    assert second.plan.variant != first.plan.variant


def test_a_plan_in_flight_is_believed_to_fit(make_device: MakeDevice) -> None:
    """Whatever this worker would forecast of it: another one found it feasible."""
    device = make_device(dimensions={})
    plans = [device.space.plan(size, {}) for size in (4, 8, 12, 40)]
    beliefs = Beliefs(device.spec(), measured(device, plans[:3]))
    assert beliefs.held.quantile(plans[3]) > device.budget
    (believed,) = _believing(beliefs, plans[3]).pending
    assert believed.ok
    assert believed.measurement.peak_reserved_bytes == device.budget


def test_a_compilation_counts_once_and_as_long_as_another_one_shows(
    make_device: MakeDevice,
) -> None:
    """A plain and a compiled probe take 3 s, and compiling took 80 s, not the 30 expected."""
    costly = Dimension(("off", "blocks", "whole"), trial_costs_s={"blocks": 30.0, "whole": 60.0})
    off, blocks, whole = (Plan(4, settings={MODE: mode}) for mode in costly.values)
    timed: dict[str, Any] = {"step_times_s": [0.1] * 10, "peak_reserved_bytes": 1 << 30}
    cold: dict[str, Any] = {"start_up_s": 80.0, "start_is_warm": False}
    trials = [
        make_trial(0, off, seconds=3.0, **timed),
        make_trial(1, blocks, seconds=83.0, **timed, **cold),
    ]
    beliefs = Beliefs(make_device(dimensions={MODE: costly}).spec(), trials)
    plain = replace(off, micro_batch=5)
    assert planner.forecast(beliefs, plain).seconds == pytest.approx(4, abs=1.5)
    assert planner.forecast(beliefs, whole).seconds == pytest.approx(164, abs=2)
    pending = _believing(beliefs, plain, whole).pending
    seconds = [trial.measurement.seconds or 0.0 for trial in pending]
    assert seconds[1] - seconds[0] == pytest.approx(160)
