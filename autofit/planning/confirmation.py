"""The end of a search: the final comparison, the answer, and why values were left out.

The plans that may be the fastest, and the baseline, are measured again at their full accumulation,
taking turns. A turn is a block: one probe, whose steps share a worker and a moment, so only several
blocks tell how well a plan repeats. Turns go on until, with 95 %, no other plan is faster than the
answer by more than `MOST_LOST`, another turn is expected to gain too little, or the effort is
spent. Then the measured speeds of this comparison decide, never a line: the plan with the highest
median wins. Plans that measured within `MOST_GIVEN_UP` of it are tied with it. A tie goes to the
plans with headroom, then to the baseline, then to the plan that changes the arithmetic least, has
the fewest settings that are not plain, and holds the fewest bytes.

Like is compared with like: blocks with blocks, and the probes of the search, which ran fewer
micro-batches at other moments, with one another. A search that was cut short before the comparison
ended returns its winner so far where the baseline has had a turn and the search found nothing
faster than it; else, the plan that the search found fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autofit.measurement import Trial, TrialKind, compared_log_speed, middle_of
from autofit.plan import Plan, Scalar, Settings
from autofit.planning.feasibility import MicroBatches
from autofit.planning.least_squares import Array
from autofit.planning.posterior import Posterior
from autofit.planning.proposals import gain_of_repeating, oom_cost
from autofit.units import format_bytes, format_rate

TIE = 0.005
"""Plans whose log speeds are nearer to each other than this are equally fast. No turn is taken
that is expected to gain less."""

MOST_GIVEN_UP = 0.02
"""A plan is tied with the fastest where it measured slower by no more than this log speed."""

MOST_LOST = 0.05
"""An answer is decided where, with 95 %, no other plan is faster by more than this log speed."""

_MOST_RIVALS = 2
_MOST_MEASURED_FASTER = 6  # rivals that no belief may pass over, because they measured faster
_MOST_BLOCKS = 8
_UNSURE = 0.2  # of the log of a factor, to either side with 95 %: "4 times" may be 3.3 or 4.9
_BLOCKS_WHERE_UNSURE = 3  # of each: their median leaves out one of another moment
_DOUBT = 0.05  # the probability that a plan is much faster after all, which is left
_CHANGED = 2.0
"""A quiet machine repeats a plan within a few percent, the accumulation that the search leaves out
included; beside busy loops factors of 10 and 33 were seen."""
_DOUBTED = math.log(1.2)
"""Samples/s lose less than this from one micro-batch to a larger one, but for few devices."""
_HEADROOM = 2.0  # deviations of held bytes below the budget


@dataclass(frozen=True)
class Finalist:
    """A plan in the final comparison.

    Attributes:
        plan: the plan.
        blocks: its fitting trials of the comparison, at least one.
        log_speed: median over the blocks of the log of samples per second, with its start over
            the whole training where that is known.
    """

    plan: Plan
    blocks: tuple[Trial, ...]
    log_speed: float


def next_turn(posterior: Posterior) -> Plan | None:
    """Return the plan whose turn it is in the final comparison; None once it has ended."""
    compared = finalists(posterior)
    first = _next_newcomer(posterior, compared)
    if first is not None or not compared:
        return first
    if sum(len(finalist.blocks) for finalist in compared) >= _MOST_BLOCKS:
        return None
    winner = _winner(posterior, compared)
    rivals = _worth_a_turn(posterior, compared, winner)
    return min([winner, *rivals], key=lambda each: len(each.blocks)).plan if rivals else None


def best_of(posterior: Posterior) -> Trial | None:
    """Return the answer; None: nothing fits.

    After the final comparison it is a trial of its winner: the one of median speed. So it is where
    the comparison was cut short after the baseline's turn, unless the search surely found a faster
    plan.
    """
    compared = finalists(posterior)
    searched = _searched_log_speeds(posterior)
    if compared:
        winner = _winner(posterior, compared)
        turns = {finalist.plan for finalist in compared}
        has_met = len(turns) > 1 and posterior.spec.space.baseline in turns
        ahead = [_ahead(posterior, plan, winner.plan) for plan in searched.keys() - turns]
        is_fastest = has_met and all(gap <= uncertain for gap, uncertain in ahead)
        if is_fastest or next_turn(posterior) is None:
            return middle_of(winner.blocks)
    fastest = max(searched, key=lambda plan: searched[plan], default=None)
    blocks = [finalist.blocks for finalist in compared if finalist.plan == fastest]
    return None if fastest is None else middle_of([*blocks, _searched(posterior)[fastest]][0])


def is_decided(posterior: Posterior, best: Plan) -> bool:
    """Return whether what was measured says that no other plan is much faster than the best."""
    is_open = _doubted(posterior, best) or _undecided(posterior, best)
    return is_factor_decided(posterior, best) and not is_open


def is_factor_decided(posterior: Posterior, best: Plan) -> bool:
    """Return whether what was measured tells how much faster the best plan is than the baseline.

    It does not where the machine changed: where the best plan or the baseline ran at another speed
    in the final comparison than in the search, however well the turns of each agree. Nor does it
    where the baseline may be much faster than the best plan. Other plans have no say.
    """
    baseline = posterior.spec.space.baseline
    has_changed = any(_changed(posterior, plan) for plan in (best, baseline))
    return not has_changed and baseline not in _undecided(posterior, best)


def finalists(posterior: Posterior) -> list[Finalist]:
    """Return the plans that have had a turn in the final comparison, the fastest first."""
    blocks: dict[Plan, list[Trial]] = {}
    for trial in posterior.fitting:
        if trial.kind is TrialKind.CONFIRMATION:
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
        )
        for plan, its in blocks.items()
    ]
    return sorted(compared, key=lambda finalist: -finalist.log_speed)


def _next_newcomer(posterior: Posterior, compared: Sequence[Finalist]) -> Plan | None:
    """Return the next plan to compare that has had no turn; None: all have.

    First the leader, then the baseline, then the plan that measured fastest, whatever noise is
    believed to explain; then the rivals, what measured faster than the answer, and where that has
    no headroom, the fastest plan that has and may be tied with it.
    """
    beliefs = {trial.plan: _expected_value(posterior, trial) for trial in posterior.fitting}
    if not beliefs:
        return None
    had_turn = {finalist.plan for finalist in compared}
    leader = max(beliefs, key=lambda plan: beliefs[plan])
    baseline = posterior.spec.space.baseline
    measured = _searched_log_speeds(posterior)
    wanted = [leader, baseline] if baseline in beliefs else [leader]
    wanted.append(max(measured, key=lambda plan: measured[plan]))
    rivals = had_turn - {baseline}
    if len(rivals) <= _MOST_RIVALS:
        others = sorted(beliefs, key=lambda plan: -beliefs[plan])
        wanted += [plan for plan in others if _gain_of_turn(posterior, plan, leader) > TIE]
    if compared and len(rivals) <= _MOST_MEASURED_FASTER:
        winner = _winner(posterior, compared)
        wanted += _measured_faster(posterior, winner.plan)
        if _lacks_headroom(posterior, winner.blocks):
            wanted += _tied_with_headroom(posterior, winner.plan)
        wanted += _doubted(posterior, winner.plan)
    return next((plan for plan in wanted if plan not in had_turn), None)


def _worth_a_turn(
    posterior: Posterior, compared: Sequence[Finalist], winner: Finalist
) -> list[Finalist]:
    """Return the finalists that more blocks are to tell from the winner: the baseline first.

    It also has more while its blocks and the winner's leave the factor between them unsure, because
    probes of either disagree.
    """
    undecided = _undecided(posterior, winner.plan)
    near = [each for each in compared if each.plan in undecided]
    baseline = posterior.spec.space.baseline
    first = [each for each in near if baseline in (each.plan, winner.plan)]
    if not first and winner.plan != baseline:
        first = [
            each
            for each in compared
            if each.plan == baseline
            and min(len(each.blocks), len(winner.blocks)) < _BLOCKS_WHERE_UNSURE
            and _ahead(posterior, baseline, winner.plan)[1] > _UNSURE
        ]
    return first or [
        each for each in near if _gain_of_turn(posterior, each.plan, winner.plan) > TIE
    ]


def _undecided(posterior: Posterior, best: Plan) -> list[Plan]:
    """Return the plans that, with 95 %, may be faster than the best by more than `MOST_LOST`.

    The baseline and any other plan by what was measured of both, because the report says by how
    much the one is slower. All others by what is believed of them too, since the lines tell of
    plans that were probed once.
    """
    baseline = posterior.spec.space.baseline

    def may_be_faster(plan: Plan) -> bool:
        if sum(_ahead(posterior, plan, best)) <= MOST_LOST:
            return False
        ahead = posterior.log_speed(plan) - posterior.log_speed(best)
        return baseline in (plan, best) or float((ahead > MOST_LOST).mean()) > _DOUBT

    return [plan for plan in _searched(posterior) if plan != best and may_be_faster(plan)]


def _changed(posterior: Posterior, plan: Plan) -> bool:
    """Whether a plan's speed in the search and in the final comparison are far apart."""
    blocks = [each.blocks for each in finalists(posterior) if each.plan == plan]
    searched = _searched(posterior).get(plan)
    if not blocks or not searched:
        return False
    apart = compared_log_speed(blocks[0]) - compared_log_speed(searched)
    return abs(apart) > math.log(_CHANGED)


def _ahead(posterior: Posterior, plan: Plan, other: Plan) -> tuple[float, float]:
    """Return the log by which a plan measured faster than another, and its 95 % uncertainty.

    By the blocks of both, or else by the probes of the search of both.
    """
    blocks = {each.plan: each for each in finalists(posterior)}
    if plan in blocks and other in blocks:
        first, second = list(blocks[plan].blocks), list(blocks[other].blocks)
        ahead = blocks[plan].log_speed - blocks[other].log_speed
    else:
        of, speeds = _searched(posterior), _searched_log_speeds(posterior)
        first, second, ahead = of[plan], of[other], speeds[plan] - speeds[other]
    errors = posterior.errors
    error = math.hypot(errors.of_all(first), errors.of_all(second))
    return ahead, error * errors.significant([*first, *second])


def _winner(posterior: Posterior, compared: Sequence[Finalist]) -> Finalist:
    """Return the finalist that wins the final comparison."""
    fastest = compared[0].log_speed
    tied = [each for each in compared if fastest - each.log_speed <= MOST_GIVEN_UP]
    return min(tied, key=lambda finalist: _preference(posterior, finalist))


def _preference(posterior: Posterior, finalist: Finalist) -> tuple[bool, bool, int, int, int]:
    """Return a key that orders equally fast plans, the most welcome first."""
    space = posterior.spec.space
    plain = space.default_settings
    changed = [name for name, value in finalist.plan.settings.items() if plain.get(name) != value]
    numerics = max((posterior.spec.numerics.get(name, 0) for name in changed), default=0)
    return (
        _lacks_headroom(posterior, finalist.blocks),
        finalist.plan != space.baseline,
        numerics,
        len(changed),
        max(_held_bytes(trial) for trial in finalist.blocks),
    )


def _lacks_headroom(posterior: Posterior, trials: Sequence[Trial]) -> bool:
    """Return whether a plan may not fit again, as far as held bytes differ from run to run.

    Its bytes stray by `Posterior.memory_error`; two such deviations below the budget, about 98 %
    of all runs fit.
    """
    held = max(_held_bytes(trial) for trial in trials)
    error = posterior.memory_error(held)
    return held * math.exp(_HEADROOM * error) > posterior.spec.vram_budget_bytes


def _tied_with_headroom(posterior: Posterior, winner: Plan) -> list[Plan]:
    """Return the fastest plan of the search with headroom that is expected to tie, if any."""
    speed = posterior.mean_log_speed(winner)
    tied = [
        plan
        for plan, trials in _searched(posterior).items()
        if not _lacks_headroom(posterior, trials)
        and posterior.mean_log_speed(plan) >= speed - MOST_GIVEN_UP
    ]
    return sorted(tied, key=posterior.mean_log_speed)[-1:]


def _measured_faster(posterior: Posterior, than: Plan) -> list[Plan]:
    """Return plans that the search found faster than that one, by an error, the fastest first.

    Those that were compared with it are left out: blocks tell more.
    """
    speeds, of = _searched_log_speeds(posterior), _searched(posterior)
    had_turn = {finalist.plan for finalist in finalists(posterior)}
    return [
        plan
        for plan in sorted(speeds, key=lambda plan: -speeds[plan])
        if plan not in had_turn
        and speeds[plan] - speeds[than]
        > math.hypot(posterior.errors.of_all(of[plan]), posterior.errors.of_all(of[than]))
    ]


def _doubted(posterior: Posterior, best: Plan) -> list[Plan]:
    """Return larger micro-batches of the best plan's variant that measured far slower, only once.

    They do so on some devices; and where the machine was slow for a time, which no probe at other
    times shows. Once one has measured so again, the others are believed.
    """
    of, speeds = _searched(posterior), _searched_log_speeds(posterior)
    compared = {each.plan: each.log_speed for each in finalists(posterior)}
    if best not in speeds:
        return []
    doubted = [
        plan
        for plan in sorted(speeds, key=lambda plan: -speeds[plan])
        if plan.variant == best.variant
        and plan.micro_batch > best.micro_batch
        and speeds[best] - speeds[plan] > _DOUBTED
    ]
    again = [plan for plan in doubted if plan in compared or len(of[plan]) > 1]
    slow = [plan for plan in again if speeds[best] - compared.get(plan, speeds[plan]) > _DOUBTED]
    return [] if slow else [plan for plan in doubted if plan not in again]


def _searched(posterior: Posterior) -> Mapping[Plan, list[Trial]]:
    """Return the search's probes of each plan that fits."""
    of: dict[Plan, list[Trial]] = {}
    for trial in posterior.fitting:
        if trial.kind is not TrialKind.CONFIRMATION:
            of.setdefault(trial.plan, []).append(trial)
    return of


def _searched_log_speeds(posterior: Posterior) -> Mapping[Plan, float]:
    """Return, per plan that fits, its log of samples/s by the probes of the search."""
    return {
        plan: float(
            posterior.over_training(
                np.array(compared_log_speed(trials)), _start_up_s(posterior, plan)
            )
        )
        for plan, trials in _searched(posterior).items()
    }


def _start_up_s(posterior: Posterior, plan: Plan) -> float:
    return float(posterior.start_up_s[posterior.index(plan)])


def _expected_value(posterior: Posterior, trial: Trial) -> float:
    """Return the expected log speed, less the cost of the risk that the plan does not fit again."""
    cost = 0.0
    if trial.kind is not TrialKind.CONFIRMATION:
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
    sizes: MicroBatches = np.median(posterior.ceilings, axis=0).astype(np.int64)
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
    leader = posterior.leader
    fitting = variants[sizes[variants] >= 1]
    if not len(fitting) or leader is None:
        return _why_too_large(posterior, variants.tolist())
    draws = posterior.log_speeds(sizes)[:, fitting]
    best = draws[:, np.median(draws, axis=0).argmax()]
    ahead = posterior.log_speed(leader.plan)
    rates = f"predicted to reach {_rate(best)} at most, and the leading plan {_rate(ahead)}"
    cost_s = min(posterior.spec.space.trial_cost_s(posterior.variants[i]) for i in fitting)
    if cost_s > 0:
        over = "" if posterior.spec.planned_samples is None else " over the whole training"
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
