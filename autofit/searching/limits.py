"""The limits of a search in probes and time, and checks of its arguments."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autofit.errors import InvalidArgument, SearchTimedOut
from autofit.measurement import Trial, TrialKind, fastest_of, oom_probes_of, probes_of
from autofit.searching.events import Progress

_LARGEST_TIMEOUT_S = 1e9  # about as long as a system call waits
# Probes in fresh workers that time is left for: two plans twice, and their gradients.
COMPARISON_PROBES = 5

# Probes that the final comparison takes at least: the incumbent and the baseline.
COMPARED = 2

# The largest share of the timeout that is left for the final comparison.
MAX_COMPARISON_SHARE = 0.4


@dataclass(frozen=True)
class Allowance:
    """The limits of one run of a search.

    Attributes:
        max_probes: the most probes, those of earlier runs included; None: unlimited.
        timeout_s: seconds from `began`; None: unlimited.
        clock: tells the time in seconds.
        began: when the run began, by the clock.
        after_s: seconds of `timeout_s` for what comes after the search.
    """

    max_probes: int | None
    timeout_s: float | None
    clock: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)
    after_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self.clock() - self.began

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the timeout, less `after_s`; None: unlimited."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - self.after_s - self.elapsed_s)

    def probes_left(self, trials: Sequence[Trial]) -> int | None:
        """Return the probes left after those trials; None: unlimited."""
        if self.max_probes is None:
            return None
        return max(0, self.max_probes - len(probes_of(trials)))

    def time_is_short(self, trials: Sequence[Trial], least_s: float) -> bool:
        """Return whether one more probe of mean duration would leave less than `least_s`."""
        left = self.seconds_left
        return left is not None and left <= _mean_seconds(trials) + least_s

    def comparison_s(self, trials: Sequence[Trial], start_s: float) -> float:
        """Return the seconds that the final comparison needs; 0 if nothing fits yet.

        Args:
            trials: so far.
            start_s: seconds that a fresh worker takes to start.
        """
        if self.timeout_s is None or not any(trial.ok for trial in trials):
            return 0.0
        in_full = [_seconds_in_full(trial) for trial in trials if trial.ok]
        probes_s = COMPARISON_PROBES * (start_s + statistics.fmean(in_full))
        return min(probes_s, MAX_COMPARISON_SHARE * self.timeout_s)

    def spent(self, trials: Sequence[Trial], start_s: float = 0.0) -> str | None:
        """Return why no further plan may be tried; None: it may.

        The final comparison needs probes, and `comparison_s`.
        """
        if not trials:
            return None
        left = self.probes_left(trials)
        # The comparison needs two probes, fewer if max_probes < 4, one when there was one before
        has_compared = any(trial.kind is TrialKind.CONFIRMATION for trial in trials)
        needed = 1 if has_compared else min(COMPARED, max(0, (self.max_probes or 0) - 2))
        if left is not None and left <= needed:
            return self._probes_are_over
        if self.time_is_short(trials, self.comparison_s(trials, start_s)):
            return self.time_is_over
        return None

    def comparison_limit(self, trials: Sequence[Trial]) -> str:
        """Return what ended a final comparison that did not come to its own end."""
        if self.probes_left(trials) == 0:
            return self._probes_are_over
        return self.time_is_over

    def progress(
        self, trials: Sequence[Trial] = (), usual_probes: tuple[int, int] | None = None
    ) -> Progress:
        """Return the state of the search after those trials, for its events."""
        return Progress(
            len(probes_of(trials)),
            oom_probes_of(trials),
            fastest_of(trials),
            self.elapsed_s,
            self.seconds_left,
            self.probes_left(trials),
            usual_probes,
        )

    @property
    def _probes_are_over(self) -> str:
        return f"max_probes={self.max_probes} was reached"

    @property
    def time_is_over(self) -> str:
        """The reason of a search that its timeout ended."""
        return f"the timeout of {self.timeout_s:.10g} s was reached"

    def too_short(self) -> SearchTimedOut:
        """Return the error of a search that its timeout ended before any plan could be returned."""
        return SearchTimedOut(
            f"the timeout of {self.timeout_s:.10g} s was reached before a plan that fits was "
            "measured: give a longer one"
        )


def _mean_seconds(trials: Sequence[Trial]) -> float:
    """Return the mean duration of the probes that ran; those that hung say nothing about others."""
    lengths = [t.measurement.seconds for t in probes_of(trials) if t.ok and t.measurement.seconds]
    return statistics.fmean(lengths) if lengths else 0.0


def _seconds_in_full(trial: Trial) -> float:
    """Return how long a probe would have taken had its steps run all their micro-batches."""
    measured, in_all = trial.measurement, trial.plan.accumulation_steps
    left_out = 1 - (measured.micro_batches_run or in_all) / in_all
    return (measured.seconds or 0.0) + left_out * sum(measured.step_times_s)


def check_timeout(timeout: Any) -> None:
    """Check `timeout=`.

    Raises:
        InvalidArgument: it is neither None nor a number of seconds.
    """
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and 0 < timeout < _LARGEST_TIMEOUT_S):
        raise InvalidArgument(
            f"timeout must be above zero seconds and below {_LARGEST_TIMEOUT_S:g}, or None for no "
            f"limit, got {timeout!r}"
        )


def check_study(study: Any) -> None:
    """Check `study=`.

    Raises:
        InvalidArgument: it is neither None, nor a path or URL.
    """
    if study is not None and not (isinstance(study, (str, os.PathLike)) and os.fspath(study)):
        raise InvalidArgument(f"study must be a file path or an Optuna storage URL, got {study!r}")
