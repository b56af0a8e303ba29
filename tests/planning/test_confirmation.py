"""The end of a search: the answer, and why values were left out."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from statistics import mean
from types import MappingProxyType
from typing import Any, TypeAlias

import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import CostHint, Dimension, Plan, Scalar
from autofit.planning.beliefs import Beliefs
from autofit.planning.confirmation import answer_of, best_of, next_turn
from autofit.planning.constants import MOST_ROUNDS
from autofit.searching.engine import run_search
from autofit.testing import SimulatedProber
from autofit.units import GIB
from tests.planning.conftest import Searched
from tests.simulated import HALF, LEVEL, PLAIN, Bursts, MakeDevice, SimulatedDevice

Slowdown: TypeAlias = Callable[[list[SimulatedProber], int], Callable[[float], float]]


def test_values_that_were_left_out_have_their_predicted_speed(searched: Searched) -> None:
    run = {pair for trial in searched[0].trials for pair in trial.plan.variant}
    levels = {("checkpointing.level", level) for level in range(5)}
    skipped = {pair for skip in searched[0].skipped for pair in skip.settings.items()}
    assert skipped == levels - run
    for skip in searched[0].skipped:
        numbers = re.findall(r"([\d.]+) samples/s", skip.why)
        assert re.match("predicted to reach .* at most, .* the best plan", skip.why)
        assert len(numbers) == len(set(numbers)), "two numbers that look equal say nothing"


PRECISE, REDUCED = Plan(16, settings={**PLAIN, LEVEL: 1}), Plan(16, settings=HALF)
BASE, OTHER, FAST = Plan(4, settings=PLAIN), Plan(4, settings=HALF), Plan(16, settings=HALF)
BASELINE, SEARCH, CONFIRMED = TrialKind.BASELINE, TrialKind.SEARCH, TrialKind.CONFIRMATION


def _trials(*measured: tuple[TrialKind, Plan, float, float]) -> list[Trial]:
    """Trials of (kind, plan, milliseconds, GiB), whose steps scatter by about 1 %."""
    trials = []
    for number, (kind, plan, milliseconds, held_gib) in enumerate(measured):
        steps = [milliseconds / 1000 * factor for factor in (0.98, 0.99, 1, 1, 1, 1.01, 1.02)]
        measurement = Measurement(
            Outcome.OK, step_times_s=steps, peak_reserved_bytes=int(held_gib * GIB)
        )
        trials.append(Trial(number, kind, plan, measurement))
    return trials


def _compared(
    device: SimulatedDevice,
    searched: list[Trial],
    measured: Mapping[Plan, float],
    held: Mapping[Plan, float] = MappingProxyType({}),
    slower: Callable[[Plan, int], float] = lambda plan, turn: 1.0,
) -> list[Trial]:
    """The trials of the final comparison of plans that take so many milliseconds and GiB.

    Args:
        device, searched: what the search knew.
        measured, held: of each plan.
        slower: plan, how many turns it had before -> the factor by which others slow it down.
    """
    trials, began, turns = list(searched), len(searched), Counter[Plan]()
    while (plan := next_turn(Beliefs(device.spec(), trials))) is not None:
        milliseconds = measured[plan] * slower(plan, turns[plan])
        turns[plan] += 1
        (trial,) = _trials((CONFIRMED, plan, milliseconds, held.get(plan, 2)))
        trials.append(replace(trial, number=len(trials)))
        assert len(trials) <= began + 5 * MOST_ROUNDS
    return trials[began:]


@pytest.mark.parametrize("busy", [0.45, 0.7])
def test_searches_beside_busy_loops_are_decided_and_right(
    make_device: MakeDevice, busy: float
) -> None:
    """Bursts slow single steps or whole probes down by a factor of 1.5 to 2.5."""
    device = make_device(global_batch=64, sample_batch_size=8)
    found = [
        run_search(device.prober(slowdown=Bursts(seed, busy), seed=seed), device.spec())
        for seed in range(12)
    ]
    plain, decided = device.space.baseline, [each for each in found if each.is_decided]
    assert len(decided) >= 10
    assert all(device.speed(each.recommended.plan) > device.speed(plain) for each in decided)
    assert {each.recommended.plan for each in found if not each.is_decided} <= {plain}
    assert mean(each.search.probes for each in found) < 30


def _drift(a_second: float) -> Slowdown:
    return lambda probers, seed: lambda seconds: math.exp(a_second * seconds)


def _by_worker(probers: list[SimulatedProber], seed: int) -> Callable[[float], float]:
    """Each process is fast or slow by a quarter as long as it lives."""
    draw = Random(seed)
    factors: Mapping[int, float] = defaultdict(lambda: draw.choice((1.0, 1.25)))
    return lambda _: factors[probers[0].renewals]


@pytest.mark.parametrize(
    "slowdown",
    [_drift(0.004), _drift(-0.004), _by_worker],
    ids=["3 % slower each round", "3 % faster each round", "two kinds of processes"],
)
def test_what_is_so_for_a_whole_round_costs_neither_the_answer_nor_its_being_decided(
    make_device: MakeDevice, slowdown: Slowdown
) -> None:
    device = make_device(global_batch=64, sample_batch_size=8)
    plain = device.space.baseline
    for seed in range(4):
        probers: list[SimulatedProber] = []
        probers.append(device.prober(slowdown=slowdown(probers, seed), seed=seed))
        found = run_search(probers[0], device.spec())
        ran = {trial.plan for trial in found.trials if trial.ok}
        assert found.is_decided
        assert device.speed(found.recommended.plan) > device.speed(plain)
        best = max(map(device.speed, ran))
        assert device.speed(found.recommended.plan) > 0.95 * best


@pytest.mark.parametrize("hit", [BASE, OTHER])
@pytest.mark.parametrize("turn", range(3))
def test_a_plan_that_was_disturbed_in_one_turn_is_told_by_its_others(
    device: SimulatedDevice, hit: Plan, turn: int
) -> None:
    searched = _trials((BASELINE, BASE, 100, 2), (SEARCH, OTHER, 80, 1))
    turns = _compared(
        device,
        searched,
        {BASE: 100, OTHER: 80},
        slower=lambda plan, before: 1.8 if (plan, before) == (hit, turn) else 1.0,
    )
    answer = _answer(device, [*searched, *turns])
    assert (answer.recommended.plan, answer.is_decided) == (OTHER, True)


def test_plans_that_are_alike_leave_the_baseline(make_device: MakeDevice) -> None:
    device = _Alike(make_device(global_batch=64, sample_batch_size=8).space)
    for seed in range(4):
        found = run_search(device.prober(seed=seed), device.spec())
        assert found.recommended.plan == device.space.baseline
        assert found.is_decided


class _Alike(SimulatedDevice):
    """Every plan takes as long as any other."""

    def step_time(self, plan: Plan) -> float:
        return 0.01 * plan.samples_per_step


def test_without_a_baseline_the_rounds_tell_the_finalists_apart(make_device: MakeDevice) -> None:
    device = make_device(budget=int(1.9 * GIB), sample_batch_size=64)
    found = run_search(device.prober(), device.spec())
    assert not found.baseline.ok
    assert found.recommended == found.best
    assert found.best.kind is CONFIRMED
    assert found.is_decided


def test_a_finalist_that_fails_in_its_turn_is_neither_compared_nor_returned(
    device: SimulatedDevice,
) -> None:
    searched = _trials((BASELINE, BASE, 100, 2), (SEARCH, FAST, 150, 3), (SEARCH, OTHER, 60, 3))
    failed = Trial(3, CONFIRMED, FAST, Measurement(Outcome.OOM))
    turns = _compared(device, [*searched, failed], {BASE: 100, OTHER: 60})
    assert {trial.plan for trial in turns} == {BASE, OTHER}
    answer = _answer(device, [*searched, failed, *turns])
    assert (answer.recommended.plan, answer.is_decided) == (OTHER, True)


def test_where_all_fail_in_their_turns_the_comparison_ends(device: SimulatedDevice) -> None:
    trials = _trials((BASELINE, BASE, 100, 2))
    trials.append(Trial(1, CONFIRMED, BASE, Measurement(Outcome.OOM)))
    assert next_turn(Beliefs(device.spec(), trials)) is None
    assert _answer(device, trials) is None


def test_a_limit_that_cuts_the_first_round_leaves_the_incumbent_and_the_baseline(
    make_device: MakeDevice,
) -> None:
    """With three finalists or more, and probes for two turns."""
    device = make_device(global_batch=64, sample_batch_size=8)
    whole = run_search(device.prober(), device.spec())
    searched = sum(trial.kind is not CONFIRMED for trial in whole.trials)
    cut = run_search(device.prober(), device.spec(), max_probes=searched + 2)
    turns = [trial.plan for trial in cut.trials if trial.kind is CONFIRMED]
    assert turns == [trial.plan for trial in whole.trials if trial.kind is CONFIRMED][:2]
    assert device.space.baseline in turns
    assert cut.recommended.plan in turns
    assert cut.is_decided


def test_the_study_alone_decides_the_order_of_a_round(device: SimulatedDevice) -> None:
    unsteady: Mapping[Plan, float] = {BASE: 100, OTHER: 100}
    searched = _trials((BASELINE, BASE, 100, 2), (SEARCH, OTHER, 99, 1))

    def order(seed: int) -> list[Plan]:
        other = replace(device.spec(), seed=seed)
        trials = list(searched)
        while (plan := next_turn(Beliefs(other, trials))) is not None:
            noise = math.exp(Random(len(trials)).gauss(0, 0.2))
            (trial,) = _trials((CONFIRMED, plan, unsteady[plan] * noise, 1))
            trials.append(replace(trial, number=len(trials)))
        return [trial.plan for trial in trials[2:]]

    orders = [order(seed) for seed in range(6)]
    assert orders == [order(seed) for seed in range(6)]
    assert len({tuple(each) for each in orders}) > 2


def _best(device: SimulatedDevice, trials: list[Trial], **spec: Any) -> Plan:
    beliefs = Beliefs(replace(device.spec(), **spec), trials)
    assert next_turn(beliefs) is None
    best: Any = best_of(beliefs)
    assert best.kind is TrialKind.CONFIRMATION
    return best.plan


def test_measured_speed_decides_and_not_the_line(device: SimulatedDevice) -> None:
    """The larger micro-batch should be faster by the line, and measured slower."""
    small, large = Plan(16, settings=HALF), Plan(24, settings=HALF)
    trials = _trials(
        (BASELINE, BASE, 100, 2),
        (SEARCH, Plan(8, settings=HALF), 100, 2),
        (SEARCH, small, 150, 3),
        (SEARCH, large, 700, 4),
        *((CONFIRMED, plan, ms, 2) for plan, ms in ((large, 700), (BASE, 100), (small, 150))),
    )
    assert _best(device, trials) == small


def test_of_equally_fast_plans_the_baseline_wins(device: SimulatedDevice) -> None:
    trials = _trials(
        (BASELINE, BASE, 100, 2),
        (SEARCH, OTHER, 99.8, 1),
        *((CONFIRMED, plan, ms, 2) for plan, ms in ((OTHER, 99.8), (BASE, 100)) for _ in range(4)),
    )
    assert _best(device, trials) == BASE


def test_a_plan_that_measures_slower_than_the_baseline_is_not_the_answer(
    device: SimulatedDevice,
) -> None:
    searched = _trials((BASELINE, BASE, 100, 2), (SEARCH, OTHER, 60, 1))
    compared = _compared(device, searched, {BASE: 100, OTHER: 120})
    assert {trial.plan for trial in compared[:2]} == {OTHER, BASE}
    assert _best(device, [*searched, *compared]) == BASE


def _noisy(trials: list[Trial], noise: float) -> list[Trial]:
    """The same trials with steps that scatter by so much around the same median."""
    return [
        replace(
            trial,
            measurement=replace(
                trial.measurement,
                step_times_s=[
                    (trial.measurement.step_time_s or 0) * math.exp(noise * z)
                    for z in (-1.2, -0.8, -0.4, 0, 0.4, 0.8, 1.2)
                ],
            ),
        )
        for trial in trials
    ]


def _answer(device: SimulatedDevice, trials: list[Trial]) -> Any:
    return answer_of(Beliefs(device.spec(), trials))


def test_rounds_that_agree_tell_plans_apart_that_the_search_could_not(
    device: SimulatedDevice,
) -> None:
    """The probes of a search are shortened, and may scatter by far more than whole turns."""
    searched = _trials((BASELINE, BASE, 100, 2), *((SEARCH, OTHER, ms, 1) for ms in (120, 160)))
    turns = zip((100, 98, 101, 99), (120, 118, 121, 119), strict=True)
    rounds = [
        t for ms, other in turns for t in ((CONFIRMED, OTHER, ms, 1), (CONFIRMED, BASE, other, 2))
    ]
    answer = _answer(device, _noisy([*searched, *_trials(*rounds)], 0.14))
    assert (answer.best.plan, answer.recommended.plan) == (OTHER, OTHER)
    assert answer.is_decided


def test_what_is_not_told_from_the_baseline_is_not_recommended(device: SimulatedDevice) -> None:
    searched = _trials((BASELINE, BASE, 100, 2), *((SEARCH, OTHER, ms, 1) for ms in (120, 160)))
    turns = zip((100, 130, 80, 105), (120, 95, 140, 112), strict=True)
    rounds = [
        t for ms, other in turns for t in ((CONFIRMED, OTHER, ms, 1), (CONFIRMED, BASE, other, 2))
    ]
    answer = _answer(device, [*searched, *_trials(*rounds)])
    assert answer.best.plan == OTHER
    assert answer.recommended.plan == BASE
    assert not answer.is_decided


def test_where_the_baseline_does_not_fit_the_fastest_plan_that_ran_is_recommended(
    device: SimulatedDevice,
) -> None:
    """There is nothing to tell it from, however far its own turns are apart."""
    failed = Trial(0, BASELINE, BASE, Measurement(Outcome.OOM))
    ran = _trials((SEARCH, OTHER, 100, 2), (SEARCH, FAST, 400, 3), (SEARCH, OTHER, 300, 2))
    answer = _answer(device, [failed, *(replace(t, number=t.number + 1) for t in ran)])
    assert answer.recommended == answer.best
    alone = _answer(device, [failed, replace(ran[0], number=1)])
    assert alone.recommended.plan == OTHER
    assert alone.is_decided


def test_a_baseline_that_no_longer_fits_is_not_recommended(device: SimulatedDevice) -> None:
    trials = _trials((BASELINE, BASE, 100, 2), (SEARCH, OTHER, 90, 1), (CONFIRMED, OTHER, 90, 1))
    refuted = Trial(3, CONFIRMED, BASE, Measurement(Outcome.OOM))
    assert _answer(device, [*trials, refuted]).recommended.plan == OTHER


def test_what_slows_the_machine_for_a_whole_round_cancels(device: SimulatedDevice) -> None:
    searched = _trials((BASELINE, BASE, 100, 2), (SEARCH, OTHER, 70, 1))
    slow = (1, 4, 1.5, 9)
    rounds = [
        t for by in slow for t in ((CONFIRMED, OTHER, 71 * by, 1), (CONFIRMED, BASE, 100 * by, 2))
    ]
    answer = _answer(device, [*searched, *_trials(*rounds)])
    assert answer.is_decided
    assert answer.recommended.plan == OTHER


@pytest.mark.parametrize("baseline_ms", [99, 107])
def test_the_comparison_goes_on_where_the_search_said_the_contrary(
    device: SimulatedDevice, baseline_ms: float
) -> None:
    """In a noisy search the baseline took 180 ms; the last word has the comparison."""
    searched = _trials((BASELINE, BASE, 180, 2), (SEARCH, OTHER, 90, 1))
    searched = _noisy(searched, 0.3)
    turns = _compared(device, searched, {BASE: baseline_ms, OTHER: 100})
    assert [trial.plan for trial in turns].count(BASE) >= 2
    assert _best(device, [*searched, *turns]) == (BASE if baseline_ms < 100 else OTHER)


def test_a_clear_case_takes_one_round(device: SimulatedDevice) -> None:
    searched = _trials((BASELINE, BASE, 100, 2), (SEARCH, FAST, 150, 3))
    turns = _compared(device, searched, {BASE: 101, FAST: 152})
    assert {trial.plan for trial in turns} == {BASE, FAST}
    assert len(turns) == 2


def test_each_round_has_every_finalist_once_and_the_comparison_four_rounds(
    device: SimulatedDevice,
) -> None:
    """Of two plans whose speeds change from turn to turn."""
    unsteady = {BASE: [100, 300, 90, 200], OTHER: [200, 110, 180, 100]}
    trials = _trials((BASELINE, BASE, 100, 2), (SEARCH, OTHER, 100, 1))
    order: list[Plan] = []
    while (plan := next_turn(Beliefs(device.spec(), trials))) is not None:
        ((_, ms),) = [(p, its[order.count(p)]) for p, its in unsteady.items() if p == plan]
        trials += [replace(t, number=len(trials)) for t in _trials((CONFIRMED, plan, ms, 1))]
        order.append(plan)
    rounds = [order[at : at + 2] for at in range(0, len(order), 2)]
    assert len(rounds) == MOST_ROUNDS
    assert all(set(each) == {BASE, OTHER} for each in rounds)
    assert not _answer(device, trials).is_decided


def test_a_tie_is_a_small_gap_and_goes_to_the_baseline(device: SimulatedDevice) -> None:
    for gap, best in ((1.015, BASE), (1.2, OTHER)):
        searched = _trials((BASELINE, BASE, 100 * gap, 2), (SEARCH, OTHER, 100, 1))
        rounds = [(CONFIRMED, p, ms, 1) for p, ms in ((OTHER, 100), (BASE, 100 * gap))] * 4
        answer = _answer(device, [*searched, *_trials(*rounds)])
        assert answer.is_decided
        assert answer.recommended.plan == answer.best.plan == best


def test_of_equally_fast_plans_one_with_headroom_wins(device: SimulatedDevice) -> None:
    """Before the more exact one, and it is compared although it measured a little slower."""
    searched = _trials(
        (BASELINE, BASE, 200, 2), (SEARCH, PRECISE, 99, 7.99), (SEARCH, REDUCED, 100, 6)
    )
    held = {BASE: 2.0, PRECISE: 7.99, REDUCED: 6.0}
    turns = _compared(device, searched, {BASE: 200, PRECISE: 99, REDUCED: 100}, held)
    assert _best(device, [*searched, *turns], numerics={"precision.dtype": 2}) == REDUCED


def test_a_search_that_was_cut_short_compares_like_with_like(device: SimulatedDevice) -> None:
    """The machine was five times slower in the comparison, where only the baseline had a turn."""
    trials = _trials(
        (BASELINE, BASE, 100, 2),
        (SEARCH, FAST, 300, 3),
        (CONFIRMED, BASE, 20, 2),
    )
    best: Any = best_of(Beliefs(device.spec(), trials))
    assert best.plan == FAST


def test_of_equally_fast_plans_the_more_exact_one_wins(device: SimulatedDevice) -> None:
    trials = _trials(
        (BASELINE, BASE, 200, 2),
        (SEARCH, PRECISE, 100.4, 4),
        (SEARCH, REDUCED, 100, 3),
        *(
            (CONFIRMED, plan, 100.4 if plan == PRECISE else 100, 3)
            for plan in (PRECISE, REDUCED) * 2
        ),
        (CONFIRMED, BASE, 200, 2),
    )
    assert _best(device, trials, numerics={"precision.dtype": 2}) == PRECISE
    # Otherwise the one that holds less, as both have one setting that is not plain.
    lean = [*trials[:-1], *_trials((CONFIRMED, REDUCED, 100, 1), (CONFIRMED, BASE, 200, 2))]
    assert _best(device, lean, numerics={LEVEL: 2}) == REDUCED


def test_of_equally_fast_plans_the_one_without_recomputation_wins(make_device: MakeDevice) -> None:
    """Although the other one has fewer settings that are not plain, and holds less."""
    hints: Mapping[Scalar, CostHint] = {1: CostHint(0.5, seconds_per_sample=1.1)}
    device = make_device(
        dimensions={
            "precision.dtype": Dimension(("default", "bfloat16")),
            "optimizer.fused": Dimension((False, True)),
            LEVEL: Dimension((0, 1), hints=hints),
        }
    )
    plain = device.space.default_settings
    lean = Plan(16, settings={**plain, LEVEL: 1})
    bare = Plan(16, settings={**plain, "precision.dtype": "bfloat16", "optimizer.fused": True})
    trials = _trials(
        (BASELINE, device.space.baseline, 200, 2),
        (SEARCH, lean, 100.4, 2),
        (SEARCH, bare, 100, 4),
        *((CONFIRMED, p, ms, held) for p, ms, held in ((bare, 100.4, 4), (lean, 100, 2)) * 2),
        (CONFIRMED, device.space.baseline, 200, 2),
    )
    assert _best(device, trials) == bare


def test_a_plan_that_measured_faster_than_the_leader_is_compared(device: SimulatedDevice) -> None:
    odd = Plan(32, settings=HALF)
    usual = [Plan(size, settings=HALF) for size in (8, 16, 64)]
    trials = _trials(
        (BASELINE, BASE, 100, 2),
        *((SEARCH, plan, 6 * plan.micro_batch, 3) for plan in usual),
        (SEARCH, odd, 100, 3),
    )
    times = {BASE: 100, odd: 100} | {plan: 6 * plan.micro_batch for plan in usual}
    assert _best(device, [*trials, *_compared(device, trials, times)]) == odd


def test_a_comparison_that_was_cut_short_has_its_winner_so_far(device: SimulatedDevice) -> None:
    """A single probe of another plan that was a little faster does not outweigh several."""
    leader, lucky = Plan(24, settings=HALF), Plan(16, settings=HALF)
    trials = _trials(
        (BASELINE, BASE, 100, 2),
        (SEARCH, leader, 300, 3),
        (SEARCH, lucky, 198, 3),
        *((CONFIRMED, plan, ms, 2) for plan, ms in ((leader, 300), (BASE, 100))),
    )
    beliefs = Beliefs(device.spec(), trials)
    assert next_turn(beliefs) == lucky
    best: Any = best_of(beliefs)
    assert best.plan == leader


FUSED, COMPILED = "optimizer.fused", "compile.mode"


def _with_levers(make_device: MakeDevice) -> SimulatedDevice:
    dimensions = {
        "precision.dtype": Dimension(("default", "bfloat16")),
        FUSED: Dimension((False, True)),
        COMPILED: Dimension(("off", "whole"), trial_cost_s=30.0),
    }
    return make_device(dimensions=dimensions, sample_batch_size=16)


def _changed(device: SimulatedDevice, **changed: Scalar) -> Plan:
    names = {"half": "precision.dtype", "fused": FUSED, "compiled": COMPILED}
    settings = {names[name]: value for name, value in changed.items()}
    return Plan(16, settings={**device.space.default_settings, **settings})


@pytest.mark.parametrize(("searched_rate", "has_turn"), [(143, True), (125, False)])
def test_a_costly_plan_that_is_not_told_from_the_incumbent_has_its_turn(
    make_device: MakeDevice, searched_rate: float, has_turn: bool
) -> None:
    """One probe beside a compilation does not say which of the two is faster."""
    device = _with_levers(make_device)
    base, half = device.space.baseline, _changed(device, half="bfloat16")
    compiled = _changed(device, half="bfloat16", compiled="whole")
    searched = _trials(
        (BASELINE, base, 16_000 / 100, 2),
        (SEARCH, half, 16_000 / 147, 2),
        (SEARCH, _changed(device, half="bfloat16", fused=True), 16_000 / 139, 2),
        (SEARCH, compiled, 16_000 / searched_rate, 2),
    )
    times = {base: 160.0, half: 109.0, compiled: 104.0 * 143 / searched_rate}
    turns = _compared(device, searched, defaultdict(lambda: 115.0, times))
    assert (compiled in {trial.plan for trial in turns}) is has_turn
    assert _best(device, [*searched, *turns]) == (compiled if has_turn else half)


@pytest.mark.parametrize(("gain", "best"), [(0.016, "fused"), (0.004, "simpler"), (0.0, "simpler")])
def test_of_plans_of_one_arithmetic_the_rounds_tell_whether_a_setting_more_is_faster(
    make_device: MakeDevice, gain: float, best: str
) -> None:
    device = _with_levers(make_device)
    base, simpler = device.space.baseline, _changed(device, half="bfloat16")
    fused = _changed(device, half="bfloat16", fused=True)
    times = {base: 160.0, simpler: 100.0, fused: 100.0 * math.exp(-gain)}
    searched = _trials((BASELINE, base, 160, 2), *((SEARCH, p, 100, 2) for p in (simpler, fused)))
    searched = _noisy(searched, 0.06)
    turns = _compared(device, searched, times)
    assert _best(device, [*searched, *turns]) == {"fused": fused, "simpler": simpler}[best]


def test_a_small_gain_is_no_reason_to_change_the_arithmetic(make_device: MakeDevice) -> None:
    device = _with_levers(make_device)
    base, exact = device.space.baseline, _changed(device, fused=True)
    half = _changed(device, half="bfloat16")
    times = {base: 160.0, exact: 100.0, half: 98.4}
    searched = _trials((BASELINE, base, 160, 2), *((SEARCH, p, 100, 2) for p in (exact, half)))
    searched = _noisy(searched, 0.06)
    turns = _compared(device, searched, times)
    assert _best(device, [*searched, *turns], numerics={"precision.dtype": 2}) == exact
