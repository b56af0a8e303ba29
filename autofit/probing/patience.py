"""How many optimizer steps of a plan are timed: the one rule, for real and simulated devices alike.

Steps go on until the 95 % interval of their median is within 1 % of it on either side, or lies
wholly above the step time that the incumbent's rate allows; from 3 steps on, and for at most 30
steps or 5 s. A plan that looks faster than the incumbent is not cut short: it may be the answer,
and its speed decides what is tried next.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofit.measurement import Measurement, Outcome
from autofit.probing.prober import ProbeRequest

FEWEST_TIMED_STEPS = 3
MOST_TIMED_STEPS = 30
MOST_TIMED_SECONDS = 5.0
CLOSE_ENOUGH = 0.01
"""Half the width of the interval, as a share of the median."""


def enough_steps(step_times_s: Sequence[float], request: ProbeRequest) -> bool:
    """Whether further timed steps would tell nothing that matters.

    Args:
        step_times_s: seconds of each whole optimizer step so far.
        request: the plan, the rate to beat, and a number of steps that overrules all else.
    """
    count = len(step_times_s)
    if request.steps is not None:
        return count >= request.steps
    if count < FEWEST_TIMED_STEPS:
        return False
    if count >= MOST_TIMED_STEPS or sum(step_times_s) >= MOST_TIMED_SECONDS:
        return True
    seen = Measurement(Outcome.OK, step_times_s=step_times_s)
    interval, middle = seen.step_time_interval_s, seen.step_time_s
    assert interval is not None  # there are step times
    assert middle is not None
    fastest, slowest = interval
    if slowest - fastest <= 2 * CLOSE_ENOUGH * middle:
        return True
    if request.incumbent_samples_per_second is None:
        return False
    time_to_beat = request.plan.samples_per_step / request.incumbent_samples_per_second
    return fastest > time_to_beat
