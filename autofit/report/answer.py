"""What a report says, in sentences: the answer against the baseline, and why not another plan.

Only the final comparison gives a factor. No number has more digits than the spread of what it was
measured by supports.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from autofit.measurement import Role, Trial, spread_of
from autofit.plan import Plan
from autofit.report.record import Record
from autofit.space import Space
from autofit.units import counted, format_bytes, format_rate, format_seconds, rounded

_TIE = (
    "a tie goes to the baseline, then to the plan that changes the arithmetic least, has the "
    "fewest settings that are not plain and needs the least memory"
)

_UNSTEADY = 0.2  # the uncertainty of the factor, as a share, from which a reader must know it


def headline(record: Record) -> str:
    """Return a line about the best plan and its speed, after one about a changed global batch."""
    best, baseline = record.best, record.baseline_beside_best
    lines = []
    if best.plan.samples_per_step != baseline.plan.samples_per_step:
        lines.append(
            f"The global batch changed from {baseline.plan.samples_per_step} to "
            f"{best.plan.samples_per_step} samples: give global_batch to keep it."
        )
    words = f"Best plan: {describe(best.plan, record)}: {speed_words(best, record)}"
    if not record.is_confirmed:
        words += (
            ", not confirmed: the final comparison did not end (the search stopped because "
            f"{record.search.stopped_because})"
        )
    start = pay_off(record)
    if best.plan == baseline.plan:
        words += f". Nothing better than your baseline was found: {_next_best(record)}"
    elif not baseline.ok:
        words += f", the baseline does not fit ({baseline.measurement.outcome.value})"
    elif record.factor is not None:
        words += f", {_against_baseline(record.factor, record)}"
    elif record.is_confirmed:
        words += ", not compared with the baseline"
    if start is not None and start.steps is not None:
        pays = f"{start.steps:,} optimizer steps have paid for"
        words += f"; its start takes {format_seconds(start.seconds)}, which {pays}"
    return "\n".join([*lines, words])


@dataclass(frozen=True)
class PayOff:
    """What the start of a plan takes that is costly to try, such as a compiled one.

    Attributes:
        seconds: before its steps have their speed; the most that was measured.
        beside: the fastest plan without such a start.
        is_compared: whether the final comparison says so, and not the trials of the search alone.
        steps: optimizer steps after which the start has paid for itself against that plan; None:
            that plan was as fast.
    """

    seconds: float
    beside: Plan
    is_compared: bool
    steps: int | None

    def words(self, record: Record) -> str:
        """Return a sentence about it."""
        words = f"Start: the best plan takes {format_seconds(self.seconds)} until it has its speed"
        other = describe(self.beside, record)
        if self.steps is None:
            return (
                f"{words}, and {other}, which starts at once, was as fast in the trials of both: "
                "search again on a quiet machine before you rely on it"
            )
        by = "" if self.is_compared else " by the trials of the search"
        return (
            f"{words}; against {other}, the fastest plan that starts at once{by}, that has paid "
            f"for itself after {self.steps:,} optimizer steps"
        )


def pay_off(record: Record) -> PayOff | None:
    """Return what the best plan's start takes; None: it starts at once, or nobody measured it.

    It is seen against the fastest plan that does, by the final comparison. Where that left out one
    that the search had found faster, both speeds are those of the search.
    """
    space, best = Space(record.dimensions, 1), record.best.plan

    def starts_at_once(plan: Plan) -> bool:
        return not space.is_costly({**record.plain_settings, **plan.settings})

    def compared_speed(plan: Plan) -> float:
        return (record.compared_speed(plan) if record.is_confirmed else None) or 0.0

    def searched_speed(plan: Plan) -> float:
        rates = [_rate(t) for t in ran if t.plan == plan and t.role is not Role.CONFIRMED]
        return statistics.geometric_mean(rates) if rates else _mean_speed(plan, record)

    ran = [t for t in record.trials if t.ok and t.role is not Role.VETOED and _rate(t)]
    starts = [t.measurement.start_up_s for t in ran if t.plan == best]
    start_s = max((seconds for seconds in starts if seconds is not None), default=None)
    others = [trial.plan for trial in ran if starts_at_once(trial.plan)]
    if start_s is None or starts_at_once(best) or not others:
        return None
    speed_of, beside = compared_speed, max(others, key=compared_speed)
    quickest = max(others, key=searched_speed)
    is_compared = compared_speed(beside) > 0.0 and (
        compared_speed(quickest) > 0.0 or searched_speed(quickest) <= searched_speed(beside)
    )
    if not is_compared:
        speed_of, beside = searched_speed, quickest
    saved_s = best.samples_per_step * (1 / speed_of(beside) - 1 / speed_of(best))
    steps = math.ceil(start_s / saved_s) if saved_s > 0 else None
    return PayOff(start_s, beside, is_compared, steps)


def describe(plan: Plan, record: Record) -> str:
    """Return a plan without its plain settings: "8 x 4, precision.dtype=bfloat16"."""
    return str(plan.without(record.plain_settings))


def speed_words(trial: Trial, record: Record) -> str:
    """Return the speed of the trial's plan: "168 samples/s"."""
    speed = record.speed_of(trial)
    return format_rate(speed, spread_of(*record.speed_range(trial)) * (speed or 0.0))


def factor_words(record: Record) -> str | None:
    """Return the best plan's speed over the baseline's: "2.11"; None: not compared."""
    return None if record.factor is None else rounded(record.factor, _spread_of_factor(record), 2)


def share_words(share: float, spread: float) -> str:
    """Return a share in percent: "3.6%"; "4%" where its spread, a share too, leaves no more."""
    return f"{rounded(100 * share, 100 * spread, 1)}%"


def _spread_of_factor(record: Record) -> float:
    """Return how far the factor is uncertain, from the ranges of both speeds; 0: not known."""
    both = (spread_of(*record.speed_range(t)) for t in (record.best, record.baseline_beside_best))
    return (record.factor or 0.0) * math.hypot(*both)


def _against_baseline(factor: float, record: Record) -> str:
    """Return the comparison of the best plan with the baseline and with a faster finalist."""
    best, baseline = record.best, record.baseline_beside_best
    theirs = f"the baseline's {speed_words(baseline, record)}"
    words = (
        f"{factor_words(record)} times {theirs}"
        if factor >= 1
        else f"{share_words(1 - factor, _spread_of_factor(record))} below {theirs}"
    )
    spread = _spread_of_factor(record)
    if ranges_overlap(record.speed_range(best), record.speed_range(baseline)):
        words += ", but their measured ranges overlap"
    elif factor >= 1 and spread > _UNSTEADY * factor:
        words += f", give or take {rounded(spread, spread, 1)}: the machine was not steady"
    less = _held(baseline) - _held(best)
    if factor < 1 and less > 0:
        words += f", and it needs {format_bytes(less)} less memory"
    fastest, speed = record.finalists[0]
    if fastest in (best.plan, baseline.plan):
        return words
    lead = _gap_words(fastest, speed, record)
    return f"{words}; tied with {describe(fastest, record)} ({lead}) and preferred to it"


def _next_best(record: Record) -> str:
    """Return how many plans were run, and how fast the fastest but the best one is."""
    best, ran = record.best, [t for t in record.trials if t.role is not Role.VETOED]
    tried = f"{counted(len({trial.plan for trial in ran}), 'plan')} run"
    finalists = [each for each in record.finalists if each[0] != best.plan]
    if is_final := record.is_confirmed and bool(finalists):
        plan, speed = finalists[0]
    else:
        others = [(t.plan, _rate(t)) for t in ran if t.ok and t.plan != best.plan]
        if not others:
            alone = all(trial.plan == best.plan for trial in ran)
            return "no other plan was run" if alone else f"{tried}, and no other worked"
        plan, speed = max(others, key=lambda each: each[1])
    its_spread = spread_of(*_range_of(plan, record)) * speed
    is_tie = is_final and speed > (record.speed_of(best) or 0.0)
    return (
        f"{tried}, the fastest other {'finalist' if is_final else 'in the search'} is "
        f"{describe(plan, record)} at {format_rate(speed, its_spread)}, "
        f"{_gap_words(plan, speed, record)}{' (a tie, which goes to the baseline)' * is_tie}"
    )


def _gap_words(plan: Plan, speed: float, record: Record) -> str:
    """Return how much faster or slower than the best plan another one is, at that speed."""
    gap = speed / (record.speed_of(record.best) or 1.0) - 1
    both = (_range_of(each, record) for each in (plan, record.best.plan))
    spread = math.hypot(*(spread_of(*each) for each in both))
    return f"{share_words(abs(gap), spread)} {'faster' if gap > 0 else 'slower'}"


def _range_of(plan: Plan, record: Record) -> tuple[float | None, float | None]:
    """Return the range of a plan's speeds in the final comparison, of its last trial without."""
    ran = [trial for trial in record.trials if trial.plan == plan and trial.ok]
    return record.speed_range((record.blocks(plan) or ran)[-1])


def ranges_overlap(
    first: tuple[float | None, float | None], second: tuple[float | None, float | None]
) -> bool:
    """Return whether two ranges, of which all ends are known, have anything in common."""
    (low, high), (others_low, others_high) = first, second
    if low is None or high is None or others_low is None or others_high is None:
        return False
    return low <= others_high and others_low <= high


def measured_faster(record: Record) -> Iterator[str]:
    """Yield a line per reason why trials that were measured faster are not the best."""
    best, speed = record.best, record.speed_of(record.best) or 0.0
    reasons: dict[str, list[str]] = {}
    for trial in record.trials:
        ran = trial.ok and trial.role is not Role.VETOED
        if ran and trial.plan != best.plan and _rate(trial) > speed:
            reasons.setdefault(_why_not_best(trial.plan, record), []).append(str(trial.number))
    for why, numbers in reasons.items():
        yield f"Trial{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {why}"


def _why_not_best(plan: Plan, record: Record) -> str:
    """Return why the plan is not the best one although a trial of it measured faster."""
    blocks = [t for t in record.trials if t.plan == plan and t.role is Role.CONFIRMED]
    failed = next((trial for trial in blocks if not trial.ok), None)
    if failed is not None:
        outcome = failed.measurement.outcome
        ended = "did not fit" if outcome.about_memory else "failed"
        return f"{ended} when it was run again (trial {failed.number}: {outcome.value})"
    compared, speed = record.compared_speed(plan), record.speed_of(record.best) or 1.0
    if record.is_confirmed and compared is not None:
        numbers = ", ".join(str(trial.number) for trial in blocks)
        gap, its = (
            _gap_words(plan, compared, record),
            f"(trial{'s' * (len(blocks) > 1)} {numbers})",
        )
        if compared < speed:
            return f"{gap} than the best plan in the final comparison {its}"
        return f"tied with the best plan in the final comparison, {gap} {its}: {_TIE}"
    if _mean_speed(plan, record) <= _mean_speed(record.best.plan, record):
        return "no faster than the best plan by the mean of all trials of each"
    if record.is_confirmed:
        return "measured in the search alone, and not among the plans of the final comparison"
    return "the final comparison, which would have decided, did not end"


def _mean_speed(plan: Plan, record: Record) -> float:
    """Return the geometric mean of the plan's samples/s over its trials that fit."""
    ran = [t for t in record.trials if t.plan == plan and t.ok and t.role is not Role.VETOED]
    return statistics.geometric_mean(_rate(trial) for trial in ran if trial.samples_per_second)


def _rate(trial: Trial) -> float:
    return trial.samples_per_second or 0.0


def _held(trial: Trial) -> int:
    return trial.measurement.held_bytes or 0
