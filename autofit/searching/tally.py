"""Trials at a glance: which were run, how many ran out of memory, which was fastest."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.measurement import Outcome, Role, Trial


def probes_of(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that were run: all but the vetoed."""
    return [trial for trial in trials if trial.role is not Role.VETOED]


def oom_probes_of(trials: Sequence[Trial]) -> int:
    """How many probes ran out of memory."""
    return sum(trial.measurement.outcome is Outcome.OOM for trial in probes_of(trials))


def fastest_of(trials: Sequence[Trial]) -> Trial | None:
    """The fastest probe so far that fits, as it was measured."""
    fits = [trial for trial in probes_of(trials) if trial.ok]
    return max(fits, key=lambda trial: trial.samples_per_second or 0.0, default=None)
