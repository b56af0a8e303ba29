"""Statistics of raw step times, and measurements that survive JSON."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from autofit.codec import from_json, to_json
from autofit.measurement import (
    Measurement,
    Outcome,
    StartUp,
    Trial,
    TrialKind,
    fastest_of,
    median_error,
)
from autofit.plan import Plan


def _measured(times: list[float]) -> Measurement:
    return Measurement(Outcome.OK, step_times_s=times)


@pytest.mark.parametrize("count", range(1, 31))
def test_the_interval_covers_the_median_with_95_percent_and_is_no_wider_than_it_must_be(
    count: int,
) -> None:
    interval = _measured([float(i) for i in range(count)]).step_time_interval_s
    assert interval is not None
    cut = int(interval[0])
    assert interval[1] == count - 1 - cut

    def missed(ranks: int) -> float:
        """The chance that the median lies outside what is left when `ranks` are cut off."""
        return float(2 * sum(math.comb(count, rank) for rank in range(ranks + 1)) / 2**count)

    assert missed(cut) <= 0.05 or cut == 0
    assert missed(cut + 1) > 0.05


def test_rates_come_from_the_global_batch_and_the_median_step() -> None:
    trial = Trial(0, TrialKind.BASELINE, Plan.split(10, 4), _measured([1.0, 2.0, 4.0]))
    row = trial.row()
    rates = [row[f"samples_per_second{of}"] for of in ("", "_low", "_high")]
    assert rates == [5.0, 2.5, 10.0]
    assert (row["outcome"], trial.samples_per_second) == ("ok", 5.0)


def test_the_fastest_plan_is_so_by_its_median_and_not_by_its_luckiest_probe() -> None:
    lucky, steady = Plan(4), Plan(8)
    probes = [(lucky, 0.2), (lucky, 1.0), (lucky, 1.0), (steady, 1.0)]
    trials = [
        Trial(number, TrialKind.SEARCH, plan, _measured([seconds]))
        for number, (plan, seconds) in enumerate(probes)
    ]
    assert fastest_of(trials) == trials[3]
    assert fastest_of(trials[:1]) == trials[0]
    assert fastest_of([]) is None


def test_what_was_not_timed_has_no_rate_and_no_interval() -> None:
    trial = Trial(1, TrialKind.SEARCH, Plan(4), Measurement(Outcome.OOM))
    assert not trial.ok
    assert (trial.samples_per_second, trial.samples_per_second_low) == (None, None)
    assert trial.measurement.step_time_interval_s is None


@pytest.mark.parametrize(
    ("reserved", "non_torch", "held"), [(100, 20, 120), (100, None, 100), (None, None, None)]
)
def test_held_bytes_are_what_is_compared_with_the_budget(
    reserved: int | None, non_torch: int | None, held: int | None
) -> None:
    found = Measurement(Outcome.OK, peak_reserved_bytes=reserved, non_torch_bytes=non_torch)
    assert found.held_bytes == held


def test_trials_survive_json_and_ignore_what_they_do_not_know() -> None:
    measured = Measurement(
        Outcome.RETRIES,
        "the allocator flushed its cache 2 times",
        step_times_s=[0.1, 0.2],
        peak_allocated_bytes=1,
        peak_reserved_bytes=2,
        non_torch_bytes=3,
        allocator_retries=2,
        micro_batches_run=2,
        loss=0.5,
        contended=True,
        seconds=1.5,
        start_up_s=0.0,
        start_is_warm=True,
    )
    trial = Trial(3, TrialKind.CONFIRMATION, Plan.split(10, 4), measured, 2**30)
    data: Any = to_json(trial) | {"from": "a later version"}
    data["measurement"]["from"] = "a later version"
    again = from_json(data, Trial, "the trial")
    assert again == trial
    assert isinstance(again.measurement.outcome, Outcome)


def test_a_trial_prints_as_one_line_of_figures() -> None:
    mib = 2**20
    measured = Measurement(
        Outcome.OK,
        step_times_s=[0.5] * 30,
        peak_allocated_bytes=3 * mib,
        peak_reserved_bytes=4 * mib,
        non_torch_bytes=mib,
    )
    assert str(Trial(0, TrialKind.SEARCH, Plan(8), measured)) == (
        "8 x 1: 16.0 samples/s, 500 ms an optimizer step, held 5.00 MiB "
        "(peak allocated 3.00 MiB, peak reserved 4.00 MiB, non-torch 1.00 MiB)"
    )
    raised = Measurement(Outcome.USER_ERROR, "ValueError: no")
    assert str(Trial(0, TrialKind.SEARCH, Plan(8), raised)) == "8 x 1: user_error: ValueError: no"


@pytest.mark.parametrize("count", [3, 5, 9, 30])
def test_the_error_of_a_median_is_how_far_medians_differ(count: int) -> None:
    draw = random.Random(count)
    samples = [[math.exp(draw.gauss(0, 0.1)) for _ in range(count)] for _ in range(2000)]
    true = statistics.stdev(math.log(statistics.median(sample)) for sample in samples)
    believed = statistics.fmean(map(median_error, samples))
    assert believed == pytest.approx(true, rel=0.2)


def test_steps_that_others_interrupt_hardly_move_the_error_of_their_median() -> None:
    steps = [0.6e-3 * (1 + 0.001 * place) for place in range(30)]
    hit = [seconds + 5e-3 if place % 5 == 0 else seconds for place, seconds in enumerate(steps)]
    assert statistics.stdev(map(math.log, hit)) > 0.5
    assert median_error(hit) < 0.01
    assert median_error([1.0]) == 0.0


@pytest.mark.parametrize(
    ("starts", "cold_s", "warm_s", "own_s"),
    [
        ([(19.0, False), (2.0, True), (3.0, True)], 19.0, 3.0, 3.0),
        ([(19.0, False), (21.0, False)], 21.0, None, 21.0),
        ([(2.0, True)], None, 2.0, 2.0),
        ([(14.0, None), (4.0, None)], 14.0, None, 14.0),
        ([(None, None)], None, None, None),
    ],
)
def test_a_training_of_ones_own_starts_warm_where_that_was_measured(
    starts: Any, cold_s: float | None, warm_s: float | None, own_s: float | None
) -> None:
    found = StartUp.of(
        Measurement(Outcome.OK, start_up_s=seconds, start_is_warm=is_warm)
        for seconds, is_warm in starts
    )
    assert (found.cold_s, found.warm_s, found.own_s) == (cold_s, warm_s, own_s)


def test_a_measurement_has_no_text_that_moves_a_cursor() -> None:
    """Its detail and notes may be words of the user's code, and a terminal shows them at once."""
    words = "\x1b]0;a title\x07\nsecond line"
    measured = Measurement(Outcome.CRASHED, detail=words, notes=[words])
    assert measured.detail == "\\x1b]0;a title\\x07\nsecond line"
    assert measured.notes == (measured.detail,)
    assert Measurement(Outcome.OK).detail is None
