"""What measured speeds say of each other, in words: faster, slower, or within measurement error.

Two trials are within measurement error of each other where their 95 % intervals overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autofit.measurement import Role, Trial
from autofit.report.record import Record
from autofit.units import format_bytes, format_rate


def against_baseline(best: Trial, baseline: Trial) -> str:
    """How the best plan compares with the baseline as it was measured beside it."""
    if not baseline.ok:
        return f"the baseline does not fit ({baseline.measurement.outcome.value})"
    if best.plan == baseline.plan:
        return "which is the baseline itself"
    theirs = format_rate(baseline.samples_per_second)
    ratio = _rate(best) / (_rate(baseline) or 1.0)
    if not best.ties_with(baseline):
        return f"{ratio:.2f} times the baseline's {theirs}"
    less = _held(baseline) - _held(best)
    if less > 0:
        return (
            f"as fast as the baseline ({theirs}) within measurement error, and it needs "
            f"{format_bytes(less)} less memory"
        )
    return f"{ratio:.2f} times the baseline's {theirs}, which is within measurement error"


def measured_faster(record: Record) -> Iterator[str]:
    """Why trials that were measured faster than the best are not the best, a line for each why."""
    best = record.trial(record.best_number)
    ran = [t for t in record.trials if t.ok and t.role is not Role.VETOED]
    reasons: dict[str, list[str]] = {}
    for trial in ran:
        if trial.plan != best.plan and _rate(trial) > _rate(best):
            reasons.setdefault(_why_not_best(trial, best, ran), []).append(str(trial.number))
    for why, numbers in reasons.items():
        yield f"Trial{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {why}"


def _why_not_best(trial: Trial, best: Trial, ran: Sequence[Trial]) -> str:
    last = [other for other in ran if other.plan == trial.plan][-1]
    fastest = max((other for other in ran if other.plan == best.plan), key=_rate)
    if last is not trial and _rate(last) <= _rate(best):
        return f"slower than the best plan when it was run again (trial {last.number})"
    if trial.ties_with(best) and _held(trial) >= _held(best):
        return "as fast as the best plan within measurement error, and needs no less memory"
    if _rate(trial) <= _rate(fastest):
        return f"no faster than the best plan was in trial {fastest.number}"
    if best.role is Role.CONFIRMED and last.role is not Role.CONFIRMED:
        return "measured in the search alone, and not among the plans that were confirmed"
    return "all measurements together do not show it to be faster"


def _rate(trial: Trial) -> float:
    return trial.samples_per_second or 0.0


def _held(trial: Trial) -> int:
    return trial.measurement.held_bytes or 0
