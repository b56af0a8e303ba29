"""The end of a search: the final comparison, the answer, and why values were left out.

The plans that may be the fastest, and the baseline, are measured again at their full accumulation,
taking turns. A turn is a block: one probe, whose steps share a worker and a moment, so only several
blocks tell how well a plan repeats. Turns go on until the plans are told apart, another turn is
expected to gain too little, or the effort is spent; where the machine changed meanwhile, the leader
and the baseline go on until two probes of each agree, and where all probes together contradict the
comparison, the leader and the plan that they favour do. Then the measured speeds of this comparison
decide, never a line: the plan with the highest median wins. Plans that cannot be told apart are
tied, and a tie goes to the baseline, then to the plan that changes the arithmetic least, has the
fewest settings that are not plain, and holds the fewest bytes; but from the fastest of the
comparison to none that all its probes together show to be slower than another plan.

A search that was cut short before the comparison ended returns its winner so far where the baseline
has had a turn and nothing measured faster, and else the plan that measured fastest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autofit.measurement import Role, Trial, compared_log_speed, middle_of
from autofit.plan import Plan, Scalar, Settings
from autofit.planning.feasibility import MicroBatches
from autofit.planning.least_squares import Array
from autofit.planning.posterior import Posterior
from autofit.planning.proposals import ceilings, gain_of_repeating, leading, oom_cost
from autofit.units import format_bytes, format_rate

TIE = 0.005
"""Plans whose log speeds are nearer to each other than this are equally fast. No turn is taken
that is expected to gain less."""

MOST_GIVEN_UP = 0.02
"""A tied plan that is preferred to the fastest may be slower by this log speed. The baseline may be
slower by as much as cannot be told apart."""

_SIGNIFICANT = 1.96  # standard errors
_BEHIND = 1.5  # likewise; fewer, because the noise is only estimated
_CHANGED = math.log(1.25)  # more than a step of fewer micro-batches differs from one of all
_MOST_RIVALS = 2
_MOST_MEASURED_FASTER = 6  # rivals that no belief may pass over, because they measured faster
_MOST_BLOCKS = 8
_BLOCKS_AFTER_CHANGE = 3  # their median leaves out one of before


@dataclass(frozen=True)
class Finalist:
    """A plan in the final comparison.

    Attributes:
        plan: the plan.
        blocks: its fitting trials of the comparison, at least one.
        log_speed: median over the blocks of the log of samples per second, with its start over
            the whole training where that is known.
        error: standard error of that.
    """

    plan: Plan
    blocks: tuple[Trial, ...]
    log_speed: float
    error: float

    def tells_apart(self, other: Finalist) -> float:
        """Return the difference of log speeds from which the two are told apart."""
        return max(TIE, _SIGNIFICANT * math.hypot(self.error, other.error))


def next_turn(posterior: Posterior) -> Plan | None:
    """Return the plan whose turn it is in the final comparison; None once it has ended."""
    compared = finalists(posterior)
    first = _next_newcomer(posterior, compared)
    if first is not None:
        return first
    may_go_on = 0 < sum(len(finalist.blocks) for finalist in compared) < _MOST_BLOCKS
    undecided = _undecided(posterior, compared) if may_go_on else []
    if not undecided and compared:
        undecided = _of_another_moment(posterior, compared)
    return min(undecided, key=lambda finalist: len(finalist.blocks)).plan if undecided else None


def best_of(posterior: Posterior) -> Trial | None:
    """Return the answer; None: nothing fits.

    After the final comparison it is a trial of its winner: the one of median speed. So it is where
    the comparison was cut short after the baseline's turn, unless another plan measured faster.
    """
    compared = finalists(posterior)
    if compared:
        winner = _winner(posterior, compared)
        has_met = len(compared) > 1 and any(
            finalist.plan == posterior.spec.space.baseline for finalist in compared
        )
        is_fastest = has_met and not _measured_faster(posterior, winner.plan)
        if is_fastest or next_turn(posterior) is None:
            return middle_of(winner.blocks)
    speeds = _mean_log_speeds(posterior)
    fastest = max(speeds, key=lambda plan: speeds[plan], default=None)
    if fastest is None:
        return None
    trials = [trial for trial in posterior.fitting if trial.plan == fastest]
    return middle_of([t for t in trials if t.role is Role.CONFIRMED] or trials)


def finalists(posterior: Posterior) -> list[Finalist]:
    """Return the plans that have had a turn in the final comparison, the fastest first."""
    blocks: dict[Plan, list[Trial]] = {}
    for trial in posterior.fitting:
        if trial.role is Role.CONFIRMED:
            blocks.setdefault(trial.plan, []).append(trial)
    compared = [
        Finalist(
            plan,
            tuple(its),
            float(
                posterior.over_training(
                    np.array(compared_log_speed(its)), _start_up_s(posterior, plan)
                )
            ),
            _standard_error(posterior, its),
        )
        for plan, its in blocks.items()
    ]
    return sorted(compared, key=lambda finalist: -finalist.log_speed)


def _next_newcomer(posterior: Posterior, compared: Sequence[Finalist]) -> Plan | None:
    """Return the next plan to compare that has had no turn; None: all have.

    First the leader, then the baseline, then the plan that measured fastest, whatever noise is
    believed to explain; then the rivals, and what measured faster than the answer.
    """
    beliefs = {trial.plan: _expected_value(posterior, trial) for trial in posterior.fitting}
    if not beliefs:
        return None
    had_turn = {finalist.plan for finalist in compared}
    leader = max(beliefs, key=lambda plan: beliefs[plan])
    baseline = posterior.spec.space.baseline
    measured = _mean_log_speeds(posterior)
    wanted = [leader, baseline] if baseline in beliefs else [leader]
    wanted.append(max(measured, key=lambda plan: measured[plan]))
    rivals = had_turn - {baseline}
    if len(rivals) <= _MOST_RIVALS:
        others = sorted(beliefs, key=lambda plan: -beliefs[plan])
        wanted += [plan for plan in others if _gain_of_turn(posterior, plan, leader) > TIE]
    if compared and len(rivals) <= _MOST_MEASURED_FASTER:
        wanted += _measured_faster(posterior, _winner(posterior, compared).plan, errors=1.0)
    return next((plan for plan in wanted if plan not in had_turn), None)


def _undecided(posterior: Posterior, compared: Sequence[Finalist]) -> list[Finalist]:
    """Return the leader and those it cannot be told from, if the difference may matter.

    The baseline comes before all others, because it would be the answer, and however little it is
    expected to gain: the report says by how much the answer is faster.
    """
    leader, *others = compared
    near = [
        other
        for other in others
        if leader.log_speed - other.log_speed < leader.tells_apart(other) > MOST_GIVEN_UP
    ]
    baseline = [other for other in near if other.plan == posterior.spec.space.baseline]
    near = baseline or [
        other for other in near if _gain_of_turn(posterior, other.plan, leader.plan) > TIE
    ]
    return [leader, *near] if near else []


def _of_another_moment(posterior: Posterior, compared: Sequence[Finalist]) -> list[Finalist]:
    """Return the leader and a plan that the machine, which changed, may have put behind it.

    Their blocks may tell two moments apart instead of two plans. The plan is one that is faster in
    all its probes together; else the baseline, where it or the leader changed since its last probe.
    """
    leader, *others = compared
    faster = _measured_faster(posterior, leader.plan)
    behind = [other for other in others if other.plan in faster]
    if not behind:
        behind = [other for other in others if other.plan == posterior.spec.space.baseline]
        behind = [
            other
            for other in behind
            if _has_changed(posterior, leader.plan) or _has_changed(posterior, other.plan)
        ]
    both = [leader, *behind[:1]]
    has_blocks = all(len(each.blocks) >= _BLOCKS_AFTER_CHANGE for each in both)
    return [] if len(both) < 2 or has_blocks else both


def _has_changed(posterior: Posterior, plan: Plan) -> bool:
    """Return whether the plan's last two probes, of search or comparison, differ beyond noise.

    Beyond that of its first probe, in the search: what the comparison calls noise is such changes.
    """
    its = [trial for trial in posterior.fitting if trial.plan == plan]
    change = compared_log_speed(its[-2:-1] or its) - compared_log_speed(its[-1:])
    noise = math.sqrt(2) * posterior.noise(its[0])
    return abs(change) > max(_CHANGED, _SIGNIFICANT * noise)


def _winner(posterior: Posterior, compared: Sequence[Finalist]) -> Finalist:
    """Return the finalist that wins the final comparison."""
    leader = compared[0]
    gaps = {finalist.plan: leader.log_speed - finalist.log_speed for finalist in compared}
    tied = [
        finalist
        for finalist in compared
        if finalist is leader
        or (
            gaps[finalist.plan] <= leader.tells_apart(finalist)
            and not _measured_faster(posterior, finalist.plan)
        )
    ]
    baseline = posterior.spec.space.baseline
    near = [finalist for finalist in tied if gaps[finalist.plan] <= MOST_GIVEN_UP]
    return next((finalist for finalist in tied if finalist.plan == baseline), None) or min(
        near, key=lambda finalist: _preference(posterior, finalist), default=leader
    )


def _preference(posterior: Posterior, finalist: Finalist) -> tuple[int, int, int]:
    """Return a key that orders equally fast plans, the most welcome first."""
    plain = posterior.spec.space.plain_settings
    changed = [name for name, value in finalist.plan.settings.items() if plain.get(name) != value]
    numerics = max((posterior.spec.numerics.get(name, 0) for name in changed), default=0)
    return numerics, len(changed), max(_held_bytes(trial) for trial in finalist.blocks)


def _measured_faster(posterior: Posterior, than: Plan, errors: float = _BEHIND) -> list[Plan]:
    """Return plans that measured faster than that one in all probes together, the fastest first.

    Args:
        posterior: of the search.
        than: the plan.
        errors: by how many standard errors they were faster.
    """
    speeds = _mean_log_speeds(posterior)
    noise = {
        plan: _standard_error(posterior, [t for t in posterior.fitting if t.plan == plan])
        for plan in speeds
    }
    return [
        plan
        for plan in sorted(speeds, key=lambda plan: -speeds[plan])
        if speeds[plan] - speeds[than] > errors * math.hypot(noise[plan], noise[than])
    ]


def _standard_error(posterior: Posterior, trials: Sequence[Trial]) -> float:
    """Return that of the mean log speed of one plan's trials."""
    noise = statistics.median(posterior.noise(trial) for trial in trials)
    return noise / math.sqrt(len(trials))


def _mean_log_speeds(posterior: Posterior) -> Mapping[Plan, float]:
    """Return, per plan that fits, the mean over its probes of the log of samples per second.

    Of all its probes, in the search and in the comparison: what it takes to say that a plan which
    the belief passed over did measure faster.
    """
    rates: dict[Plan, list[float]] = {}
    for trial in posterior.fitting:
        rates.setdefault(trial.plan, []).append(math.log(trial.samples_per_second or 0.0))
    return {
        plan: float(
            posterior.over_training(np.array(statistics.fmean(logs)), _start_up_s(posterior, plan))
        )
        for plan, logs in rates.items()
    }


def _start_up_s(posterior: Posterior, plan: Plan) -> float:
    return float(posterior.start_up_s[posterior.index(plan)])


def _expected_value(posterior: Posterior, trial: Trial) -> float:
    """Return the expected log speed, less the cost of the risk that the plan does not fit again."""
    cost = 0.0
    if trial.role is not Role.CONFIRMED:
        cost = float(oom_cost(posterior, np.array(posterior.oom_risk(trial.plan))))
    return posterior.mean_log_speed(trial.plan) - cost


def _gain_of_turn(posterior: Posterior, plan: Plan, other: Plan) -> float:
    """Return what another block of a plan is expected to gain in log speed.

    Chosen without it is the one of the two that is expected to be faster.
    """
    ahead = posterior.log_speed(plan) - posterior.log_speed(other)
    if ahead.mean() > 0:
        ahead = -ahead
    noise = next(posterior.noise(trial) for trial in posterior.fitting if trial.plan == plan)
    return float(gain_of_repeating(ahead[:, None], np.array([noise]))[0])


def _held_bytes(trial: Trial) -> int:
    held = trial.measurement.held_bytes
    assert held is not None, "a trial that fits has its held bytes"
    return held


def left_out(posterior: Posterior) -> list[tuple[Settings, str]]:
    """Return settings that were left out, each with the reason.

    First those that faults exclude, then each value of a setting that was never run.
    """
    excluded = [(dict(pairs), why) for pairs, why in posterior.exclusions.blamed.items()]
    sizes: MicroBatches = np.median(ceilings(posterior), axis=0).astype(np.int64)
    run = {pair for trial in posterior.probes for pair in trial.plan.variant}
    never = [
        ({name: value}, why)
        for name, dimension in posterior.spec.space.dimensions.items()
        for value in dimension.values
        if (name, value) not in run and (why := _why_not_run(posterior, name, value, sizes))
    ]
    return [*excluded, *never]


def _why_not_run(posterior: Posterior, name: str, value: Scalar, sizes: MicroBatches) -> str | None:
    """Return why that value was not run; None if all its variants are excluded.

    Args:
        posterior: after the search.
        name, value: the setting and its value.
        sizes: the expected ceiling of each variant.
    """
    has_value = np.array([settings[name] == value for settings in posterior.variants])
    variants = np.flatnonzero(has_value & posterior.usable)
    if not len(variants):
        return None
    leader = leading(posterior)
    fitting = variants[sizes[variants] >= 1]
    if not len(fitting) or leader is None:
        return _why_too_large(posterior, variants.tolist())
    draws = posterior.log_speeds(sizes)[:, fitting]
    best = draws[:, np.median(draws, axis=0).argmax()]
    ahead = posterior.log_speed(leader.plan)
    rates = f"predicted to reach {_rate(best)} at most, and the leading plan {_rate(ahead)}"
    cost_s = min(posterior.spec.space.trial_cost_s(posterior.variants[i]) for i in fitting)
    if cost_s > 0:
        over = "" if posterior.spec.train_samples is None else " over the whole training"
        rates = f"about {cost_s:.0f} s more to try; with that {rates}{over}"
    is_slower = np.median(best) <= np.median(ahead)
    return rates if is_slower else f"not tried before the search stopped: {rates}"


def _rate(log_speeds: Array) -> str:
    """Return the median of drawn log samples/s, with the digits that their scatter supports."""
    speed = float(np.exp(np.median(log_speeds)))
    return format_rate(speed, float(np.std(log_speeds)) * speed)


def _why_too_large(posterior: Posterior, variants: Sequence[int]) -> str:
    """Return the reason if no plan of those variants is predicted to fit."""
    space, smallest = posterior.spec.space, posterior.sizes.smallest
    plans = [space.plan(int(smallest[i]), posterior.variants[i]) for i in variants]
    held_bytes = [float(np.median(posterior.held_bytes(plan))) for plan in plans]
    held, plan = min(zip(held_bytes, plans, strict=True), key=lambda pair: pair[0])
    return (
        f"predicted to hold {format_bytes(held)} at micro-batch {plan.micro_batch} where "
        f"{format_bytes(posterior.spec.vram_budget_bytes)} are allowed"
    )
