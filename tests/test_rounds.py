"""What rounds of a comparison tell of two plans, on machines that others disturb."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.rounds import Rounds, rounds_of, steady_log_speed

FIRST, SECOND, THIRD = Plan(1), Plan(2), Plan(3)
SEARCH, CONFIRMED = TrialKind.SEARCH, TrialKind.CONFIRMATION


def trials(*measured: tuple[TrialKind, Plan, float]) -> list[Trial]:
    """Trials of (kind, plan, seconds of a step of one sample)."""
    return [
        Trial(
            number,
            kind,
            plan,
            Measurement(Outcome.OK, step_times_s=[plan.samples_per_step * seconds] * 3),
        )
        for number, (kind, plan, seconds) in enumerate(measured)
    ]


def in_rounds(seconds: Sequence[tuple[float, float]]) -> list[Trial]:
    return trials(
        *(
            (CONFIRMED, plan, each)
            for pair in seconds
            for plan, each in zip((FIRST, SECOND), pair, strict=True)
        )
    )


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
    probes = (
        Trial(0, SEARCH, FIRST, Measurement(Outcome.OK, step_times_s=times))
        for times in (clean, hit)
    )
    speeds = [steady_log_speed(probe) for probe in probes]
    assert speeds[0] == pytest.approx(speeds[1], abs=0.01)


def test_the_estimate_of_either_plan_beside_the_other_is_the_same() -> None:
    told = Rounds(in_rounds([(1.0, 1.3), (1.1, 1.4)]))
    there, back = told.ahead(FIRST, SECOND), told.ahead(SECOND, FIRST)
    assert (there.log, there.low, there.high) == pytest.approx(
        (-back.log, -back.high, -back.low), abs=0.01
    )


def test_rounds_that_agree_decide_and_more_of_them_more_closely() -> None:
    widths = []
    for count in (1, 2, 4):
        searched = trials((SEARCH, FIRST, 1.0), (SEARCH, SECOND, 1.2))
        ahead = Rounds([*searched, *in_rounds([(1.0, 1.2)] * count)]).ahead(FIRST, SECOND)
        assert ahead.low > 0
        assert ahead.low < math.log(1.2) < ahead.high
        widths.append(ahead.high - ahead.low)
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("slower", [1.5, 2.0])
def test_what_was_seen_once_is_not_believed_where_a_hit_explains_it(slower: float) -> None:
    alone = Rounds(trials((SEARCH, FIRST, 1.0), (SEARCH, SECOND, slower)))
    assert alone.ahead(FIRST, SECOND).low < 0
    contrary = Rounds(
        [*trials((SEARCH, FIRST, slower), (SEARCH, SECOND, 1.0)), *in_rounds([(1.0, slower)])]
    )
    assert contrary.ahead(FIRST, SECOND).low < 0


def test_one_round_that_was_hit_hardly_moves_the_others() -> None:
    ahead = Rounds(in_rounds([(1.0, 1.3), (1.01, 1.29), (2.4, 1.31), (1.0, 1.3)])).ahead(
        FIRST, SECOND
    )
    assert ahead.low > 0
    assert ahead.log == pytest.approx(math.log(1.3), abs=0.03)


def test_what_slows_every_round_more_cancels() -> None:
    rounds = [(by, 1.25 * by) for by in (1.0, 1.6, 2.7, 5.0)]
    ahead = Rounds(in_rounds(rounds)).ahead(FIRST, SECOND)
    assert ahead.low > 0
    assert ahead.log == pytest.approx(math.log(1.25), abs=0.03)


@pytest.mark.parametrize("drift", [0.03, -0.03])
def test_what_drifts_from_round_to_round_hides_no_small_gain(drift: float) -> None:
    searched = trials((SEARCH, FIRST, 1.0), (SEARCH, SECOND, 1.02))
    slower = [math.exp(drift * at) for at in range(3)]
    rounds = in_rounds([(by, 1.04 * by) for by in slower])
    ahead = Rounds([*searched, *rounds]).ahead(FIRST, SECOND)
    assert 0 < ahead.low < math.log(1.04) < ahead.high


def test_many_steady_probes_are_told_from_a_slow_baseline() -> None:
    """Eight probes at 117 to 137 samples/s against a baseline of 61 were "11 to 140"."""
    speeds = [(117, 61), (137, 62), (125, 55), (131, 64)]
    ahead = Rounds(in_rounds([(1 / fast, 1 / slow) for fast, slow in speeds])).ahead(FIRST, SECOND)
    assert ahead.low > math.log(1.5)
