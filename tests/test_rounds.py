"""What rounds of a comparison tell of two plans, on machines that others disturb."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.rounds import Rounds, rounds_of, steady_log_speed

FIRST, SECOND, THIRD = Plan(1), Plan(2), Plan(3)
SEARCH, CONFIRMED = TrialKind.SEARCH, TrialKind.CONFIRMATION


def trials(*measured: tuple[TrialKind, Plan, float]) -> list[Trial]:
    """Trials of (kind, plan, seconds of a step of one sample)."""
    times = [(kind, plan, [plan.samples_per_step * each] * 3) for kind, plan, each in measured]
    return [
        Trial(number, kind, plan, Measurement(Outcome.OK, step_times_s=steps))
        for number, (kind, plan, steps) in enumerate(times)
    ]


def in_rounds(*seconds: tuple[float, float]) -> list[Trial]:
    pairs = (zip((FIRST, SECOND), pair, strict=True) for pair in seconds)
    return trials(*((CONFIRMED, plan, each) for pair in pairs for plan, each in pair))


def test_a_plan_that_has_its_turn_again_begins_another_round() -> None:
    order = [FIRST, SECOND, SECOND, THIRD, FIRST, FIRST]
    rounds = rounds_of(trials(*((CONFIRMED, plan, 1.0) for plan in order)))
    assert [list(each) for each in rounds] == [[FIRST, SECOND], [SECOND, THIRD, FIRST], [FIRST]]


def test_a_turn_that_failed_leaves_the_rounds_as_they_were() -> None:
    """Each round is slower than the one before, and what failed began the second."""
    failed = replace(trials((CONFIRMED, FIRST, 1.0))[0], measurement=Measurement(Outcome.OOM))
    first = trials((CONFIRMED, FIRST, 1.0), (CONFIRMED, SECOND, 1.0))
    later = trials(*((CONFIRMED, p, by) for by in (2.0, 4.0, 8.0) for p in (THIRD, SECOND)))
    in_order = [replace(t, number=at) for at, t in enumerate([*first, failed, *later])]
    ahead = Rounds(in_order).ahead(THIRD, SECOND)
    assert ahead.log == pytest.approx(0.0, abs=0.01)


def test_steps_that_others_delay_do_not_move_the_speed_of_a_probe() -> None:
    clean = [0.1 + 0.0001 * at for at in range(10)]
    hit = [seconds * (2 if at % 3 else 1) for at, seconds in enumerate(clean)]
    one, other = (
        steady_log_speed(Trial(0, SEARCH, FIRST, Measurement(Outcome.OK, step_times_s=times)))
        for times in (clean, hit)
    )
    assert one == pytest.approx(other, abs=0.01)


def test_the_estimate_of_either_plan_beside_the_other_is_the_same() -> None:
    told = Rounds(in_rounds((1.0, 1.3), (1.1, 1.4)))
    there, back = told.ahead(FIRST, SECOND), told.ahead(SECOND, FIRST)
    assert (there.log, there.low, there.high) == pytest.approx(
        (-back.log, -back.high, -back.low), abs=0.01
    )


def test_rounds_that_agree_decide_and_more_of_them_more_closely() -> None:
    searched = trials((SEARCH, FIRST, 1.0), (SEARCH, SECOND, 1.2))
    found = [
        Rounds([*searched, *in_rounds(*[(1.0, 1.2)] * count)]).ahead(FIRST, SECOND)
        for count in (1, 2, 4)
    ]
    assert all(0 < ahead.low < math.log(1.2) < ahead.high for ahead in found)
    widths = [ahead.high - ahead.low for ahead in found]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("slower", [1.5, 2.0])
def test_what_was_seen_once_is_not_believed_where_a_hit_explains_it(slower: float) -> None:
    alone = trials((SEARCH, FIRST, 1.0), (SEARCH, SECOND, slower))
    contrary = trials((SEARCH, FIRST, slower), (SEARCH, SECOND, 1.0))
    assert Rounds(alone).ahead(FIRST, SECOND).low < 0
    assert Rounds([*contrary, *in_rounds((1.0, slower))]).ahead(FIRST, SECOND).low < 0


@pytest.mark.parametrize(
    ("rounds", "ratio"),
    [
        # One round that was hit hardly moves the others.
        ([(1.0, 1.3), (1.01, 1.29), (2.4, 1.31), (1.0, 1.3)], 1.3),
        # What slows every round more cancels.
        ([(by, 1.25 * by) for by in (1.0, 1.6, 2.7, 5.0)], 1.25),
    ],
)
def test_what_hits_a_round_or_slows_both_plans_hides_no_gain(
    rounds: list[tuple[float, float]], ratio: float
) -> None:
    ahead = Rounds(in_rounds(*rounds)).ahead(FIRST, SECOND)
    assert ahead.low > 0
    assert ahead.log == pytest.approx(math.log(ratio), abs=0.03)


@pytest.mark.parametrize("drift", [0.03, -0.03])
def test_what_drifts_from_round_to_round_hides_no_small_gain(drift: float) -> None:
    searched = trials((SEARCH, FIRST, 1.0), (SEARCH, SECOND, 1.02))
    rounds = in_rounds(*((by, 1.04 * by) for by in (math.exp(drift * at) for at in range(3))))
    ahead = Rounds([*searched, *rounds]).ahead(FIRST, SECOND)
    assert 0 < ahead.low < math.log(1.04) < ahead.high


def test_many_steady_probes_are_told_from_a_slow_baseline() -> None:
    """Eight probes at 117 to 137 samples/s against a baseline of 61 were "11 to 140"."""
    speeds = [(117, 61), (137, 62), (125, 55), (131, 64)]
    ahead = Rounds(in_rounds(*((1 / fast, 1 / slow) for fast, slow in speeds)))
    assert ahead.ahead(FIRST, SECOND).low > math.log(1.5)
