"""How far step times differ from one probe of a plan to the next."""

from __future__ import annotations

import math

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.planning.noise import BETWEEN, Noise


def _trial(number: int, middle: float, scatter: float, micro_batch: int = 4) -> Trial:
    times = [middle * math.exp(scatter * place) for place in (-1.0, 0.0, 1.0)]
    measured = Measurement(Outcome.OK, step_times_s=times)
    return Trial(number, TrialKind.SEARCH, Plan(micro_batch), measured)


def test_repeats_that_differ_more_than_their_steps_raise_the_error() -> None:
    apart = [_trial(number, middle, 0.01) for number, middle in enumerate((1.0, 1.1, 0.9))]
    noise = Noise(apart)
    assert [len(trials) for trials in noise.repeated] == [3]
    assert noise.of(apart[0]) > 0.05
    alike = [_trial(number, 1.0, 0.001) for number in range(8)]
    assert Noise(alike).of(alike[0]) < 0.5 * BETWEEN
