"""The trials worth choosing between: none that fits is faster and holds less."""

from __future__ import annotations

from collections.abc import Iterable

from autofit.measurement import Role, Trial


def frontier(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """The trials that no other trial beats in both speed and held bytes, the fastest first.

    Of several trials of one plan the last that ran counts: a confirmation knows better than a
    probe, and a vetoed proposal only repeats one.
    """
    ran = [t for t in trials if t.role is not Role.VETOED and t.ok and t.samples_per_second]
    latest = {trial.plan: trial for trial in ran}
    by_speed = sorted(latest.values(), key=lambda trial: -(trial.samples_per_second or 0.0))
    kept: list[Trial] = []
    for trial in by_speed:
        held = trial.measurement.held_bytes
        if held is None or any((other.measurement.held_bytes or 0) <= held for other in kept):
            continue
        kept.append(trial)
    return tuple(kept)
