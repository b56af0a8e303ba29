"""What a report says, in sentences: the answer against the baseline, and why not another plan.

Only the final comparison gives a factor. No number has more digits than the spread of what it was
measured by supports.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from autofit.measurement import Role, Trial, probes_of, spread_of
from autofit.plan import Plan
from autofit.report.record import Record
from autofit.space import Space
from autofit.units import counted, format_bytes, format_rate, format_seconds, rounded

_TIE = (
    "a tie goes to a plan with headroom, then to the baseline, then to the plan that changes the "
    "arithmetic least, has the fewest settings that are not plain and needs the least memory"
)


def headline(record: Record) -> str:
    """Return a line about the best plan and its speed, after one about a changed global batch."""
    best, baseline = record.best, record.baseline_beside_best
    lines = []
    if best.plan.samples_per_step != baseline.plan.samples_per_step:
        lines.append(
            f"The global batch changed from {baseline.plan.samples_per_step} to "
            f"{best.plan.samples_per_step} samples: give global_batch to keep it."
        )
    if not record.search.is_decided:
        return "\n".join([*lines, _not_decided(record)])
    words = f"Best plan: {describe(best.plan, record)}: {speed_words(best, record)}"
    if not record.is_confirmed:
        words += (
            ", not confirmed: the final comparison did not end (the search stopped because "
            f"{record.search.stopped_because})"
        )
    start = pay_off(record)
    if best.plan == baseline.plan:
        words += f". {_next_best(record)}"
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


def factor_words(record: Record) -> tuple[str, str] | None:
    """Return the best plan's speed over the baseline's, and its 95 % interval, in words.

    ("2.11", "2.05 to 2.17"); None: they were not compared.
    """
    if record.factor is None:
        return None
    (low, high), spread = _range_of_factor(record), _spread_of_factor(record)
    ends = (rounded(end, spread, 2) for end in (low, high))
    return rounded(record.factor, spread, 2), " to ".join(ends)


def share_words(share: float, spread: float) -> str:
    """Return a share in percent: "3.6%"; "4%" where its spread, a share too, leaves no more."""
    return f"{rounded(100 * share, 100 * spread, 1)}%"


def _range_of_factor(record: Record) -> tuple[float, float]:
    """Return the 95 % interval of the factor, from those of both speeds."""
    ranges = (record.speed_range(t) for t in (record.best, record.baseline_beside_best))
    reach = math.hypot(*(math.log((high or 1.0) / (low or 1.0)) / 2 for low, high in ranges))
    factor = record.factor or 0.0
    return factor * math.exp(-reach), factor * math.exp(reach)


def _spread_of_factor(record: Record) -> float:
    """Return how far the factor is uncertain to either side; 0: not known."""
    low, high = _range_of_factor(record)
    return (high - low) / 2


def _against_baseline(factor: float, record: Record) -> str:
    """Return the comparison of the best plan with the baseline and with a faster finalist."""
    best, baseline = record.best, record.baseline_beside_best
    theirs = f"the baseline's {speed_words(baseline, record)}"
    words = f"{share_words(1 - factor, _spread_of_factor(record))} below {theirs}"
    if factor >= 1:
        shown, ends = factor_words(record) or ("", "")
        words = f"{shown} ({ends}) times {theirs}"
    if ranges_overlap(record.speed_range(best), record.speed_range(baseline)):
        words += ", but their measured ranges overlap"
    less = _held(baseline) - _held(best)
    if factor < 1 and less > 0:
        words += f", and it needs {format_bytes(less)} less memory"
    fastest, speed = record.finalists[0]
    if fastest in (best.plan, baseline.plan):
        return words
    lead = _gap_words(fastest, speed / (record.compared_speed(best.plan) or speed), record)
    return f"{words}; tied with {describe(fastest, record)} ({lead}) and preferred to it"


def _not_decided(record: Record) -> str:
    """Return a sentence with the speeds of the fastest plan and the baseline, and no factor."""
    best, baseline = record.best, record.baseline_beside_best
    fastest = _trial_of(_fastest_other(record), record) if best.plan == baseline.plan else best
    words = "Not decided:"
    if fastest is not None:
        words += f" {describe(fastest.plan, record)} ran at {_range_words(fastest, record)} and"
    words += f" the baseline, {describe(baseline.plan, record)}, "
    words += f"at {_range_words(baseline, record)}" if baseline.ok else "did not fit"
    return (
        f"{words} (95 %), and what was measured does not tell which plan is the fastest: the "
        f"measurements were noisy, and the search stopped because {record.search.stopped_because}. "
        "Search again on a quiet machine, or with more probes and time"
    )


def _range_words(trial: Trial, record: Record) -> str:
    """Return the range of a plan's speed, wide enough for each of its probes."""
    ran = [t for t in probes_of(record.trials) if t.plan == trial.plan and t.samples_per_second]
    speeds = [t.samples_per_second or 0.0 for t in ran]
    low, high = record.speed_range(trial)
    low, high = min([low or 0.0, *speeds]), max([high or 0.0, *speeds])
    spread = spread_of(low, high) * high
    return f"{rounded(low, spread, 1)} to {format_rate(high, spread)}"


def _fastest_other(record: Record) -> tuple[Plan, float] | None:
    """Return the fastest plan but the best, with its samples/s over the best one's.

    By the final comparison, or else by the search, where both were in it. None: there is none.
    """
    best = record.best.plan
    speed_of = record.compared_speed
    if not record.is_confirmed or all(plan == best for plan, _ in record.finalists):
        speed_of = record.searched_speed
    own = speed_of(best)
    plans = dict.fromkeys(trial.plan for trial in record.trials if trial.plan != best)
    speeds = [(plan, speed / own) for plan in plans if own and (speed := speed_of(plan))]
    return max(speeds, key=lambda each: each[1], default=None)


def _trial_of(other: tuple[Plan, float] | None, record: Record) -> Trial | None:
    """Return a trial of that plan: of its blocks, if it has any."""
    if other is None:
        return None
    ran = [t for t in probes_of(record.trials) if t.plan == other[0] and t.ok]
    return (record.blocks(other[0]) or ran)[-1]


def _next_best(record: Record) -> str:
    """Return that the baseline is best, how many plans were run, and how fast the next one is."""
    best, ran = record.best, probes_of(record.trials)
    found = "Nothing better than your baseline was found"
    tried = f"{counted(len({trial.plan for trial in ran}), 'plan')} run"
    other = _fastest_other(record)
    trial = _trial_of(other, record)
    if other is None or trial is None:
        alone = all(each.plan == best.plan for each in ran)
        return f"{found}: {'no other plan was run' if alone else f'{tried}, and no other worked'}"
    plan, ratio = other
    is_final = record.is_confirmed and record.compared_speed(plan) is not None
    speed = record.compared_speed(plan) if is_final else record.searched_speed(plan)
    low, high = record.speed_range(trial)
    if ratio > 1:
        found = "No plan was found that is faster than your baseline by more than a tie"
    return (
        f"{found}: {tried}, the fastest other {'finalist' if is_final else 'in the search'} is "
        f"{describe(plan, record)} at {format_rate(speed, spread_of(low, high) * (speed or 0.0))}, "
        f"{_gap_words(plan, ratio, record)}{' (a tie, which goes to the baseline)' * (ratio > 1)}"
    )


def _gap_words(plan: Plan, ratio: float, record: Record) -> str:
    """Return how much faster or slower than the best plan another one is, by that ratio."""
    both = (_range_of(each, record) for each in (plan, record.best.plan))
    spread = math.hypot(*(spread_of(*each) for each in both))
    return f"{share_words(abs(ratio - 1), spread)} {'faster' if ratio > 1 else 'slower'}"


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
            _gap_words(plan, compared / speed, record),
            f"(trial{'s' * (len(blocks) > 1)} {numbers})",
        )
        if compared < speed:
            return f"{gap} than the best plan in the final comparison {its}"
        return f"tied with the best plan in the final comparison, {gap} {its}: {_TIE}"
    searched = record.searched_speed
    if (searched(plan) or 0.0) <= (searched(record.best.plan) or 0.0):
        return "no faster than the best plan by the trials of the search"
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
