"""How far step times differ from one probe of a plan to the next.

By more than the error of their medians, because the machine does. That variance is learned from
plans that were probed more than once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autofit.measurement import Trial, by_plan

BETWEEN = 0.01
"""Standard deviation of the log of a probe's step time from one probe to the next before any plan
was repeated. It counts as one repetition."""


class Noise:
    """The errors of probes; all are standard deviations of logs of step times.

    Args:
        probes: of a search; those without step times are left out.

    Attributes:
        repeated: the timed probes of each plan that was timed more than once.
    """

    def __init__(self, probes: Sequence[Trial]) -> None:
        timed = [trial for trial in probes if trial.measurement.step_times_s]
        self.repeated = [trials for trials in by_plan(timed).values() if len(trials) > 1]
        self._between = self._learned()

    def of(self, trial: Trial) -> float:
        """Return the error of one of the timed probes: of its steps, and between probes."""
        return math.hypot(trial.measurement.step_error, self._between)

    def _learned(self) -> float:
        """Return the deviation between probes of one plan, beyond that of their steps."""
        squares, degrees = BETWEEN**2, 1
        for trials in self.repeated:
            logs = [log_seconds_of(trial) for trial in trials]
            explained = statistics.fmean(trial.measurement.step_error**2 for trial in trials)
            mean = statistics.fmean(logs)
            squares += sum((log - mean) ** 2 for log in logs) - explained * (len(logs) - 1)
            degrees += len(logs) - 1
        return math.sqrt(max(squares, BETWEEN**2) / degrees)


def log_seconds_of(trial: Trial) -> float:
    """Return the log of the median seconds of one micro-batch of a timed probe."""
    return math.log((trial.measurement.step_time_s or 0.0) / trial.plan.accumulation_steps)
