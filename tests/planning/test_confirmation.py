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
from typing import Any

import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import CostHint, Dimension, Plan, Scalar
from autofit.planning.beliefs import Beliefs
from autofit.planning.confirmation import answer_of, best_of, next_turn
from autofit.planning.constants import MAX_ROUNDS
from autofit.searching.engine import run_search
from autofit.testing import SimulatedProber
from autofit.units import GIB
from tests.planning.conftest import Searched
from tests.simulated import HALF, LEVEL, PLAIN, Bursts, MakeDevice, SimulatedDevice


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


def _trials(*measured: tuple[TrialKind, Plan, float, float], noise: float = 0.01) -> list[Trial]:
    """Trials of (kind, plan, milliseconds, GiB), whose steps scatter by so much."""
    trials = []
    for number, (kind, plan, milliseconds, held_gib) in enumerate(measured):
        steps = [milliseconds / 1000 * math.exp(noise * z) for z in (-2, -1, 0, 0, 0, 1, 2)]
        held = int(held_gib * GIB)
        measurement = Measurement(Outcome.OK, step_times_s=steps, peak_reserved_bytes=held)
        trials.append(Trial(number, kind, plan, measurement))
    return trials


def _answer(device: SimulatedDevice, trials: list[Trial]) -> Any:
    return answer_of(Beliefs(device.spec(), trials))


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
        assert len(trials) <= began + 5 * MAX_ROUNDS
    return trials[began:]


@pytest.fixture
def shared(make_device: MakeDevice) -> SimulatedDevice:
    """With a global batch of 64 samples."""
    return make_device(global_batch=64, sample_batch_size=8)


@pytest.mark.parametrize("busy", [0.45, 0.7])
def test_searches_beside_busy_loops_are_decided_and_right(
    shared: SimulatedDevice, busy: float
) -> None:
    """Bursts slow single steps or whole probes down by a factor of 1.5 to 2.5."""
    found = [
        run_search(shared.prober(slowdown=Bursts(seed, busy), seed=seed), shared.spec())
        for seed in range(6)
    ]
    plain, decided = shared.space.baseline, [each for each in found if each.is_decided]
    assert len(decided) >= 5
    assert all(shared.speed(each.recommended.plan) > shared.speed(plain) for each in decided)
    assert {each.recommended.plan for each in found if not each.is_decided} <= {plain}
    assert mean(each.search.probes for each in found) < 30


@pytest.mark.parametrize(
    "slowdown",
    [
        lambda s, worker: math.exp(0.004 * s),
        lambda s, worker: math.exp(-0.004 * s),
        lambda s, worker: 1.25 if Random(worker).random() < 0.5 else 1.0,
    ],
    ids=["3 % slower each round", "3 % faster each round", "two kinds of processes"],
)
def test_what_is_so_for_a_whole_round_costs_neither_the_answer_nor_its_being_decided(
    shared: SimulatedDevice, slowdown: Callable[[float, int], float]
) -> None:
    def slower(seconds: float) -> float:
        return slowdown(seconds, probers[-1].renewals)

    probers: list[SimulatedProber] = []
    for seed in range(2):
        probers.append(shared.prober(slowdown=slower, seed=seed))
        found = run_search(probers[-1], shared.spec())
        assert found.is_decided
        best = max(shared.speed(trial.plan) for trial in found.trials if trial.ok)
        assert shared.speed(found.recommended.plan) > 0.95 * best


def test_plans_that_are_alike_leave_the_baseline(shared: SimulatedDevice) -> None:
    for seed in range(2):
        prober = SimulatedProber(
            shared.budget, shared.memory, lambda plan: 0.01 * plan.samples_per_step,
            memory_noise=0.005, time_noise=0.003, seed=seed,
        )  # fmt: skip
        found = run_search(prober, shared.spec())
        assert found.recommended.plan == shared.space.baseline
        assert found.is_decided


def test_without_a_baseline_the_rounds_tell_the_finalists_apart(make_device: MakeDevice) -> None:
    device = make_device(budget=int(1.9 * GIB), sample_batch_size=64)
    found = run_search(device.prober(), device.spec())
    assert not found.baseline.ok
    assert found.recommended == found.best
    assert found.best.kind is CONFIRMED
    assert found.is_decided


SEARCHED = _trials((BASELINE, BASE, 100, 2), (SEARCH, OTHER, 80, 1))


@pytest.mark.parametrize("hit", [BASE, OTHER])
@pytest.mark.parametrize("turn", range(3))
def test_a_plan_that_was_disturbed_in_one_turn_is_told_by_its_others(
    device: SimulatedDevice, hit: Plan, turn: int
) -> None:
    turns = _compared(
        device,
        SEARCHED,
        {BASE: 100, OTHER: 80},
        slower=lambda plan, before: 1.8 if (plan, before) == (hit, turn) else 1.0,
    )
    answer = _answer(device, [*SEARCHED, *turns])
    assert (answer.recommended.plan, answer.is_decided) == (OTHER, True)


def test_a_clear_case_takes_one_round(device: SimulatedDevice) -> None:
    turns = _compared(device, SEARCHED, {BASE: 101, OTHER: 81})
    assert sorted(map(str, (trial.plan for trial in turns))) == sorted(map(str, (BASE, OTHER)))


def test_a_finalist_that_fails_in_its_turn_is_neither_compared_nor_returned(
    device: SimulatedDevice,
) -> None:
    searched = _trials((BASELINE, BASE, 100, 2), (SEARCH, FAST, 150, 3), (SEARCH, OTHER, 60, 3))
    searched.append(Trial(3, CONFIRMED, FAST, Measurement(Outcome.OOM)))
    turns = _compared(device, searched, {BASE: 100, OTHER: 60})
    assert {trial.plan for trial in turns} == {BASE, OTHER}
    answer = _answer(device, [*searched, *turns])
    assert (answer.recommended.plan, answer.is_decided) == (OTHER, True)


REFUTED = Trial(3, CONFIRMED, BASE, Measurement(Outcome.OOM))


def test_where_all_fail_in_their_turns_the_comparison_ends(device: SimulatedDevice) -> None:
    trials = [SEARCHED[0], REFUTED]
    assert next_turn(Beliefs(device.spec(), trials)) is None
    assert _answer(device, trials) is None


def test_a_baseline_that_no_longer_fits_is_not_recommended(device: SimulatedDevice) -> None:
    trials = _trials((BASELINE, BASE, 100, 2), (SEARCH, OTHER, 90, 1), (CONFIRMED, OTHER, 90, 1))
    assert _answer(device, [*trials, REFUTED]).recommended.plan == OTHER


@pytest.mark.parametrize("ran", [[(OTHER, 100)], [(OTHER, 100), (FAST, 400), (OTHER, 300)]])
def test_where_the_baseline_does_not_fit_the_fastest_plan_that_ran_is_recommended(
    device: SimulatedDevice, ran: list[tuple[Plan, float]]
) -> None:
    """There is nothing to tell it from, however far its own turns are apart."""
    trials = _trials((BASELINE, BASE, 1, 1), *((SEARCH, plan, ms, 2) for plan, ms in ran))
    trials[0] = replace(trials[0], measurement=Measurement(Outcome.OOM))
    answer = _answer(device, trials)
    assert answer.recommended == answer.best
    assert len(ran) > 1 or (answer.best.plan, answer.is_decided) == (OTHER, True)


def test_a_limit_that_cuts_the_first_round_leaves_the_incumbent_and_the_baseline(
    shared: SimulatedDevice,
) -> None:
    """With three finalists or more, and probes for two turns."""
    whole = run_search(shared.prober(), shared.spec())
    searched = sum(trial.kind is not CONFIRMED for trial in whole.trials)
    cut = run_search(shared.prober(), shared.spec(), max_probes=searched + 2)
    turns = [trial.plan for trial in cut.trials if trial.kind is CONFIRMED]
    assert turns == [trial.plan for trial in whole.trials if trial.kind is CONFIRMED][:2]
    assert shared.space.baseline in turns
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

    orders = [order(seed) for seed in range(4)]
    assert orders == [order(seed) for seed in range(4)]
    assert len({tuple(each) for each in orders}) > 1


def _best(device: SimulatedDevice, trials: list[Trial], **spec: Any) -> Plan:
    beliefs = Beliefs(replace(device.spec(), **spec), trials)
    assert next_turn(beliefs) is None
    best: Any = best_of(beliefs)
    assert best.kind is TrialKind.CONFIRMATION
    return best.plan


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
    assert len(rounds) == MAX_ROUNDS
    assert all(set(each) == {BASE, OTHER} for each in rounds)
    assert not _answer(device, trials).is_decided


@pytest.mark.parametrize(
    ("searched_ms", "other_ms", "baseline_ms", "best", "is_told"),
    [
        ((120, 160), (100, 98, 101, 99), (120, 118, 121, 119), OTHER, True),
        ((120, 160), (100, 130, 80, 105), (120, 95, 140, 112), OTHER, False),
        ((70,), (71, 284, 106.5, 639), (100, 400, 150, 900), OTHER, True),
        ((100,), (100,) * 4, (101.5,) * 4, BASE, True),
        ((80,), (100,) * 4, (120,) * 4, OTHER, True),
    ],
    ids=["rounds agree", "rounds contradict", "the machine slows down", "a tie", "a clear gap"],
)
def test_the_rounds_tell_plans_apart_or_the_baseline_is_recommended(
    device: SimulatedDevice,
    searched_ms: tuple[float, ...],
    other_ms: tuple[float, ...],
    baseline_ms: tuple[float, ...],
    best: Plan,
    is_told: bool,
) -> None:
    """The probes of a search are shortened, and may scatter by far more than whole turns."""
    turns = [
        (CONFIRMED, plan, ms, 1)
        for both in zip(other_ms, baseline_ms, strict=True)
        for plan, ms in zip((OTHER, BASE), both, strict=True)
    ]
    searched = ((SEARCH, OTHER, ms, 1) for ms in searched_ms)
    noise = 0.1 if (is_told and len(searched_ms) > 1) else 0.01
    answer = _answer(device, _trials((BASELINE, BASE, 100, 2), *searched, *turns, noise=noise))
    assert answer.best.plan == best
    assert answer.recommended.plan == (best if is_told else BASE)
    assert answer.is_decided is is_told


SMALL, LARGE = Plan(16, settings=HALF), Plan(24, settings=HALF)


@pytest.mark.parametrize(
    ("searched", "times", "noise", "best"),
    [
        # the larger micro-batch should be faster by the line, and measured slower
        (
            {BASE: 100, Plan(8, settings=HALF): 100, SMALL: 150, LARGE: 700},
            {}, 0.01, SMALL,
        ),
        ({BASE: 100, OTHER: 60}, {OTHER: 120}, 0.01, BASE),
        ({BASE: 100, OTHER: 99.8}, {}, 0.01, BASE),
        # in a noisy search the baseline took 180 ms; the last word has the comparison
        ({BASE: 180, OTHER: 90}, {BASE: 99, OTHER: 100}, 0.2, BASE),
        ({BASE: 180, OTHER: 90}, {BASE: 107, OTHER: 100}, 0.2, OTHER),
        # faster than the leader of its line
        (
            {BASE: 100, Plan(32, settings=HALF): 100}
            | {Plan(n, settings=HALF): 6 * n for n in (8, 16, 64)},
            {}, 0.01, Plan(32, settings=HALF),
        ),
    ],
    ids=["measured speed", "slower than the baseline", "as fast as the baseline", "99 ms",
         "107 ms", "faster than the leader"],
)  # fmt: skip
def test_the_comparison_decides_and_not_the_search(
    device: SimulatedDevice,
    searched: dict[Plan, float],
    times: dict[Plan, float],
    noise: float,
    best: Plan,
) -> None:
    trials = _trials(
        *((SEARCH if plan != BASE else BASELINE, plan, ms, 2) for plan, ms in searched.items()),
        noise=noise,
    )
    turns = _compared(device, trials, searched | times)
    assert _best(device, [*trials, *turns]) == best


def test_of_equally_fast_plans_one_with_headroom_wins(device: SimulatedDevice) -> None:
    """Before the more exact one, and it is compared although it measured a little slower."""
    held = {BASE: 2.0, PRECISE: 7.99, REDUCED: 6.0}
    times = {BASE: 200, PRECISE: 99, REDUCED: 100}
    searched = _trials(*((SEARCH, plan, ms, held[plan]) for plan, ms in times.items()))
    searched[0] = replace(searched[0], kind=BASELINE)
    turns = _compared(device, searched, times, held)
    assert _best(device, [*searched, *turns], numerics={"precision.dtype": 2}) == REDUCED


@pytest.mark.parametrize(
    ("numerics", "lean_gib", "best"),
    [({"precision.dtype": 2}, 3, PRECISE), ({LEVEL: 2}, 1, REDUCED)],
)
def test_of_equally_fast_plans_the_more_exact_one_wins_or_the_one_that_holds_less(
    device: SimulatedDevice, numerics: dict[str, int], lean_gib: float, best: Plan
) -> None:
    trials = _trials(
        (BASELINE, BASE, 200, 2),
        (SEARCH, PRECISE, 100.4, 4),
        (SEARCH, REDUCED, 100, 3),
        *((CONFIRMED, PRECISE, 100.4, 3), (CONFIRMED, REDUCED, 100, lean_gib)) * 2,
        (CONFIRMED, BASE, 200, 2),
    )
    assert _best(device, trials, numerics=numerics) == best


def test_a_search_that_was_cut_short_compares_like_with_like(device: SimulatedDevice) -> None:
    """The machine was five times slower in the comparison, where only the baseline had a turn."""
    trials = _trials((BASELINE, BASE, 100, 2), (SEARCH, FAST, 300, 3), (CONFIRMED, BASE, 20, 2))
    best: Any = best_of(Beliefs(device.spec(), trials))
    assert best.plan == FAST


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


@pytest.mark.parametrize(
    ("name", "gain", "is_worth_it"),
    [
        ("fused", 0.016, True),
        ("fused", 0.004, False),
        ("fused", 0.0, False),
        ("half", 0.016, False),
    ],
)
def test_of_plans_of_one_arithmetic_the_rounds_tell_whether_a_setting_more_is_faster(
    make_device: MakeDevice, name: str, gain: float, is_worth_it: bool
) -> None:
    """A small gain is no reason to change the arithmetic."""
    device = _with_levers(make_device)
    base, half = device.space.baseline, _changed(device, half="bfloat16")
    fused = _changed(device, half="bfloat16", fused=True)
    simpler, faster = (half, fused) if name == "fused" else (_changed(device, fused=True), half)
    times = {base: 160.0, simpler: 100.0, faster: 100.0 * math.exp(-gain)}
    searched = _trials(
        (BASELINE, base, 160, 2), *((SEARCH, p, 100, 2) for p in (simpler, faster)), noise=0.04
    )
    turns = _compared(device, searched, times)
    best = _best(device, [*searched, *turns], numerics={"precision.dtype": 2})
    assert best == (faster if is_worth_it else simpler)
