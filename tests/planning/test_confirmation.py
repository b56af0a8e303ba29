"""The end of a search: the answer, and why values were left out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Plan
from autofit.planning.confirmation import best_of, confirm
from autofit.planning.posterior import Posterior
from autofit.searching.engine import run_search
from autofit.units import GIB
from tests.simulated import (
    HALF,
    PLAIN,
    SimulatedDevice,
    make_trial,
)


def test_values_that_were_left_out_have_their_predicted_speed(device: SimulatedDevice) -> None:
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
def test_a_plan_no_better_than_the_baseline_is_not_the_answer(
    device: SimulatedDevice, milliseconds: float, held_gib: float, wins: bool
) -> None:
    def measured(middle: float, held: float) -> dict[str, Any]:
        steps = [middle / 1000 * factor for factor in (0.96, 0.98, 1, 1, 1, 1.02, 1.04)]
        return {"step_times_s": steps, "peak_reserved_bytes": int(held * GIB)}

    plain, other = device.space.baseline, Plan(4, settings=HALF)
    trials = [
        replace(make_trial(0, plain, **measured(100, 2)), role=Role.BASELINE),
        *(make_trial(number, other, **measured(92, held_gib)) for number in (1, 2, 3)),
        replace(make_trial(4, other, **measured(milliseconds, held_gib)), role=Role.CONFIRMED),
    ]
    assert confirm(Posterior(device.spec(), trials)) == (None if wins else plain)
    trials.append(replace(make_trial(5, plain, **measured(100, 2)), role=Role.CONFIRMED))
    best = best_of(Posterior(device.spec(), trials))
    assert best is not None
    assert best.plan == (other if wins else plain)
