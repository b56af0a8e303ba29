"""The planner: what it decides, and that it decides from spec and trials alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Dimension, Hint, Plan, Scalar, variant_key
from autofit.planning import planner
from autofit.planning.confirmation import best_of, confirm
from autofit.planning.feasibility import exclusions_of
from autofit.planning.planner import MAX_STEP, oom_cost
from autofit.planning.posterior import Posterior
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.units import GIB
from tests.simulated import MakeDevice, SimulatedDevice

PLAIN: dict[str, Scalar] = {"precision.dtype": "as_is", "checkpointing.level": 0}
LEVEL = "checkpointing.level"
HALF: dict[str, Scalar] = {"precision.dtype": "bfloat16", "checkpointing.level": 0}


def _trial(number: int, plan: Plan, outcome: Outcome = Outcome.OK, **measured: Any) -> Trial:
    role = Role.BASELINE if number == 0 else Role.SEARCH
    return Trial(number, role, plan, Measurement(outcome, **measured))


def test_the_baseline_comes_first(device: SimulatedDevice) -> None:
    assert planner.decide(Posterior(device.spec(), ())).plan == device.space.baseline


def test_a_decision_depends_on_facts_and_trials_alone(device: SimulatedDevice) -> None:
    spec, trials = device.spec(), run_search(device.prober(), device.spec(), max_probes=7).trials
    again = SearchSpec.from_dict(spec.to_dict())
    for count in range(1, len(trials)):
        first = planner.decide(Posterior(spec, trials[:count]))
        assert planner.decide(Posterior(again, trials[:count])) == first


def test_vetoed_trials_change_no_decision(device: SimulatedDevice) -> None:
    trials = run_search(device.prober(), device.spec(), max_probes=5).trials[:4]
    vetoed = replace(trials[1], role=Role.VETOED, measurement=Measurement(Outcome.OVER_BUDGET))
    before = Posterior(device.spec(), trials)
    assert before.updated((*trials, vetoed)) is before
    assert planner.decide(Posterior(device.spec(), (*trials, vetoed))) == planner.decide(before)
    assert before.updated(trials[:-1]).probes == list(trials[:-1])


def test_it_finds_the_best_plan_with_few_probes_and_no_oom(device: SimulatedDevice) -> None:
    result = run_search(device.prober(), device.spec())
    assert device.speed(result.best.plan) >= 0.97 * device.optimum()
    assert result.oom_probes == 0
    assert result.probes <= 16


def test_hints_save_probes(device: SimulatedDevice, make_device: MakeDevice) -> None:
    hinted = {
        "precision.dtype": Dimension(("as_is", "bfloat16"), hints={"bfloat16": Hint(0.6, 0.5)}),
        "checkpointing.level": Dimension(
            (0, 1, 2, 3, 4), hints={n: Hint(1 - 0.15 * n, 1 + 0.08 * n) for n in range(1, 5)}
        ),
    }
    other = make_device(dimensions=hinted)
    with_hints = run_search(other.prober(), other.spec())
    without = run_search(device.prober(), device.spec())
    assert device.speed(with_hints.best.plan) >= 0.97 * device.optimum()
    assert with_hints.probes < without.probes


def test_a_hint_on_fixed_bytes_is_used_before_anything_of_it_is_measured(
    make_device: MakeDevice,
) -> None:
    """An optimizer state of half the size leaves room for larger micro-batches."""
    results = {}
    for fixed_bytes in (0.5, None):
        hint = Hint(bytes_per_sample=1.0, seconds_per_sample=1.0, fixed_bytes=fixed_bytes)
        state = Dimension(("plain", "8bit"), hints={"8bit": hint})
        levels = Dimension((0, 1, 2, 3, 4))
        device = make_device(dimensions={LEVEL: levels, "optimizer.state": state}, fixed=5 * GIB)
        results[fixed_bytes] = run_search(device.prober(), device.spec())
    best, probes = results[0.5].best, results[0.5].probes
    assert best.plan.settings["optimizer.state"] == "8bit"
    assert device.speed(best.plan) >= 0.97 * device.optimum()
    assert results[0.5].oom_probes == 0
    assert probes <= min(12, results[None].probes - 2)


def test_no_step_is_longer_than_four_times_the_largest_measured(device: SimulatedDevice) -> None:
    largest = 0
    for request in _probed(device):
        assert largest == 0 or request.plan.micro_batch <= 4 * largest
        largest = max(largest, request.plan.micro_batch)


def _probed(device: SimulatedDevice) -> list[Any]:
    prober = device.prober()
    run_search(prober, device.spec())
    requests: list[Any] = prober.probed
    return requests


def test_a_plan_that_ran_out_of_memory_bounds_its_variant(device: SimulatedDevice) -> None:
    spec = device.spec()
    trials = [
        _trial(0, Plan(4, settings=PLAIN), step_times_s=[0.1] * 6, peak_reserved_bytes=2 * 2**30),
        _trial(1, Plan(16, settings=PLAIN), Outcome.OOM),
    ]
    found = exclusions_of(spec, trials)
    assert found.bound(PLAIN) == 15
    assert found.bound(HALF) is None


def test_a_size_limit_bounds_its_variant_and_moves_no_memory_line(device: SimulatedDevice) -> None:
    spec = device.spec()
    baseline = _trial(
        0, Plan(4, settings=PLAIN), step_times_s=[0.1] * 6, peak_reserved_bytes=2 * 2**30
    )
    limited = _trial(1, Plan(8, settings=HALF), Outcome.SIZE_LIMIT)
    known = Posterior(spec, [baseline, limited])
    assert known.exclusions.bound(HALF) == 7
    alone = Posterior(spec, [baseline])
    assert len(known._memory_points()) == len(alone._memory_points()) == 1


@pytest.mark.parametrize(("contended", "at_least"), [(False, 24 * GIB), (True, 3 * GIB)])
def test_where_others_took_the_room_a_plan_is_only_known_to_need_what_it_held(
    device: SimulatedDevice, contended: bool, at_least: int
) -> None:
    spec = replace(device.spec(), vram_budget_bytes=24 * GIB)
    ran_out = _trial(
        0, Plan(8, settings=PLAIN), Outcome.OOM, peak_reserved_bytes=3 * GIB, contended=contended
    )
    (point,) = Posterior(spec, [ran_out])._memory_points()
    assert (point.y, point.at_least) == (at_least, True)


@pytest.mark.parametrize(
    ("steps", "believed"),
    [([0.1] * 6, (0.025, 0.035)), ([0.07, 0.13, 0.08, 0.12, 0.09, 0.11], (0.0, 0.02))],
)
def test_a_plan_that_repeats_well_is_believed_as_measured_and_a_noisy_one_by_its_line(
    device: SimulatedDevice, steps: list[float], believed: tuple[float, float]
) -> None:
    def speed_of_16(factor: float) -> float:
        trials = [
            _trial(
                number,
                Plan(size, settings=PLAIN),
                step_times_s=[size * (factor if size == 16 else 1.0) * step for step in steps],
            )
            for number, size in enumerate((4, 8, 16, 32))
        ]
        return float(Posterior(device.spec(), trials).log_speed(trials[2].plan).mean())

    low, high = believed
    assert low <= speed_of_16(1.0) - speed_of_16(1.03) <= high


def test_a_fault_is_blamed_on_what_never_worked(device: SimulatedDevice) -> None:
    both: dict[str, Scalar] = {"precision.dtype": "bfloat16", "checkpointing.level": 2}
    trials = [
        _trial(0, Plan(4, settings=PLAIN), step_times_s=[0.1]),
        _trial(1, Plan(4, settings=both), Outcome.NONFINITE, detail="loss nan"),
    ]
    found = exclusions_of(device.spec(), trials)
    assert found.why(both) == "nonfinite: loss nan"
    assert found.why(HALF) is None
    level_works = _trial(
        2, Plan(4, settings={**PLAIN, "checkpointing.level": 2}), step_times_s=[0.1]
    )
    assert exclusions_of(device.spec(), [*trials, level_works]).why(HALF) is not None


def test_a_small_micro_batch_that_fails_is_not_the_variants_fault(device: SimulatedDevice) -> None:
    trials = [
        _trial(0, Plan(4, settings=PLAIN), step_times_s=[0.1]),
        _trial(1, Plan(1, settings=HALF), Outcome.UNSUPPORTED, detail="BatchNorm"),
    ]
    found = exclusions_of(device.spec(), trials)
    assert found.why(HALF) is None
    assert found.least(HALF) == 4


def test_costly_values_are_tried_last_and_on_leaders_alone(make_device: MakeDevice) -> None:
    costly = Dimension((False, True), trial_cost_s=30.0)
    other = make_device(
        dimensions={
            "precision.dtype": Dimension(("as_is", "bfloat16")),
            "checkpointing.level": Dimension((0, 1, 2)),
            "compile.model": costly,
        }
    )
    requests = [r for r in _probed(other) if not r.full_accumulation]
    compiled = [bool(r.plan.settings["compile.model"]) for r in requests]
    assert any(compiled)
    first = compiled.index(True)
    assert not any(compiled[:first])
    cheap = {r.plan.variant for r in requests[:first]}
    for request in requests[first:]:
        assert {**request.plan.settings, "compile.model": False}.items() in [
            dict(variant).items() for variant in cheap
        ]


def test_with_a_global_batch_every_plan_keeps_it(make_device: MakeDevice) -> None:
    other = make_device(global_batch=50)
    for request in _probed(other):
        assert request.plan.global_batch == 50
        assert sum(request.plan.micro_batch_sizes) == 50
    result = run_search(other.prober(), other.spec())
    assert other.speed(result.best.plan) >= 0.97 * other.optimum()


def test_a_split_that_may_not_change_leaves_one_geometry(make_device: MakeDevice) -> None:
    other = make_device(global_batch=50, may_resplit=False)
    splits = {r.plan.accumulation_steps for r in _probed(other)}
    assert splits == {other.space.baseline.accumulation_steps}


def test_the_largest_micro_batch_is_kept(make_device: MakeDevice) -> None:
    assert max(r.plan.micro_batch for r in _probed(make_device(max_micro_batch=9))) <= 9


def test_what_was_skipped_is_said_with_its_predicted_speed(device: SimulatedDevice) -> None:
    result = run_search(device.prober(), device.spec(), max_probes=40)
    run = {pair for trial in result.trials for pair in trial.plan.variant}
    levels = {("checkpointing.level", level) for level in range(5)}
    skipped = {pair for skip in result.skipped for pair in skip.settings.items()}
    assert skipped == levels - run
    for skip in result.skipped:
        assert re.search(r"predicted to reach .* and the leading plan [\d.]+ samples/s", skip.why)


def test_one_confirmation_is_enough_where_one_plan_leads(device: SimulatedDevice) -> None:
    result = run_search(device.prober(), device.spec())
    assert result.best.role is Role.CONFIRMED
    assert confirm(Posterior(device.spec(), result.trials)) is None


def test_of_equally_fast_plans_the_one_that_holds_less_wins(device: SimulatedDevice) -> None:
    steps = [0.1] * 8
    lean, full = Plan(4, settings={**PLAIN, "checkpointing.level": 1}), Plan(4, settings=PLAIN)
    trials = []
    for number in range(6):
        plan, held = ((full, 6), (lean, 3))[number % 2]
        role = Role.CONFIRMED if number > 3 else Role.SEARCH
        measurement = Measurement(Outcome.OK, step_times_s=steps, peak_reserved_bytes=held * 2**30)
        trials.append(Trial(number, role, plan, measurement))
    best = best_of(Posterior(device.spec(), trials))
    assert best is not None
    assert best.plan == lean


@pytest.mark.parametrize(
    ("milliseconds", "held_gib", "wins"),
    [(103, 3, False), (103, 1, True), (120, 1, False), (99, 3, True)],
    ids=["tied and hungry", "tied and lean", "slower and lean", "faster"],
)
def test_a_plan_no_better_than_the_baseline_is_no_answer(
    device: SimulatedDevice, milliseconds: float, held_gib: float, wins: bool
) -> None:
    def measured(middle: float, held: float) -> dict[str, Any]:
        steps = [middle / 1000 * factor for factor in (0.96, 0.98, 1, 1, 1, 1.02, 1.04)]
        return {"step_times_s": steps, "peak_reserved_bytes": int(held * GIB)}

    plain, other = device.space.baseline, Plan(4, settings=HALF)
    trials = [
        replace(_trial(0, plain, **measured(100, 2)), role=Role.BASELINE),
        *(_trial(number, other, **measured(92, held_gib)) for number in (1, 2, 3)),
        replace(_trial(4, other, **measured(milliseconds, held_gib)), role=Role.CONFIRMED),
    ]
    assert confirm(Posterior(device.spec(), trials)) == (None if wins else plain)
    trials.append(replace(_trial(5, plain, **measured(100, 2)), role=Role.CONFIRMED))
    best = best_of(Posterior(device.spec(), trials))
    assert best is not None
    assert best.plan == (other if wins else plain)


def _predicted(device: SimulatedDevice, *, most_changed: int = 1) -> Any:
    """The specification with predicted lines of variants with at most so many changed settings."""
    lines = {}
    for settings in device.space.variants():
        changed = sum(value != PLAIN[name] for name, value in settings.items())
        if changed <= most_changed:
            at_1, at_2 = (device.memory(Plan(n, settings=settings)) for n in (1, 2))
            lines[variant_key(settings)] = (2 * at_1 - at_2, at_2 - at_1)
    return replace(device.spec(), predicted_lines=lines)


@pytest.mark.parametrize("most_changed", [1, 2], ids=["one setting at a time", "every variant"])
def test_predicted_lines_spare_a_baseline_that_fits_nothing_larger(
    make_device: MakeDevice, most_changed: int
) -> None:
    other = make_device(sample_batch_size=1)
    spec = _predicted(other, most_changed=most_changed)
    trials = run_search(other.prober(), spec, max_probes=2).trials[:1]
    plan = planner.decide(Posterior(spec, trials)).plan
    assert plan is not None
    expected = planner.forecast(Posterior(spec, ()), plan).peak_bytes
    assert expected == pytest.approx(other.memory(plan), rel=0.05)


def test_lines_of_one_setting_at_a_time_are_composed(device: SimulatedDevice) -> None:
    """Where variants have no line of their own; levels without one lie between their neighbours."""
    spec = _predicted(device)
    few = {key: line for key, line in spec.predicted_lines.items() if dict(key)[LEVEL] in (0, 4)}
    for lines, near in ((spec.predicted_lines, 0.03), (few, 0.15)):
        posterior = Posterior(replace(spec, predicted_lines=lines), ())
        for index, settings in enumerate(posterior.variants):
            plan = Plan(16, settings=settings)
            expected = float(np.median(posterior.held_bytes(plan)))
            assert expected == pytest.approx(device.memory(plan), rel=near), (index, settings)


def test_with_predicted_lines_variants_start_just_below_their_ceilings(
    device: SimulatedDevice,
) -> None:
    """Or as far past the largest micro-batch so far as any probe may go."""
    without = run_search(device.prober(), device.spec())
    result = run_search(device.prober(), _predicted(device))
    largest, known = 4, {device.space.baseline.variant}
    for trial in result.trials[1:]:
        size = trial.plan.micro_batch
        if trial.plan.variant not in known:
            assert device.memory(trial.plan) > 0.75 * device.budget or size == MAX_STEP * largest
        known.add(trial.plan.variant)
        largest = max(largest, size)
    assert len(known) > 4
    assert result.oom_probes == 0
    assert result.probes < without.probes
    assert device.speed(result.best.plan) > 0.97 * device.optimum()


@pytest.mark.parametrize(
    ("told", "has_prior_memory"),
    [
        ("nothing", False),
        ("nothing of nothing", False),
        ("some", False),
        ("hints", True),
        ("lines", True),
    ],
)
def test_risks_are_weighed_in_proportion_only_with_a_prior_on_memory(
    device: SimulatedDevice, told: str, has_prior_memory: bool
) -> None:
    spec: SearchSpec = device.spec()
    if told == "lines":
        lines = {variant_key(settings): (1e9, 1e8) for settings in spec.space.variants()}
        spec = replace(spec, predicted_lines=lines)
    elif told == "nothing of nothing":
        spec = replace(spec, space=replace(spec.space, dimensions={}))
    elif told != "nothing":
        hinted = [*spec.space.dimensions][: None if told == "hints" else 1]
        dimensions = {
            name: replace(each, hints=dict.fromkeys(each.values[1:], Hint(bytes_per_sample=0.9)))
            if name in hinted
            else each
            for name, each in spec.space.dimensions.items()
        }
        spec = replace(spec, space=replace(spec.space, dimensions=dimensions))
    small, large = oom_cost(Posterior(spec, ()), np.array([0.04, 0.36]))
    assert large / small == pytest.approx(9 if has_prior_memory else 3)
