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

from autofit.measurement import Trial, TrialKind, by_plan, compared_log_speed, middle_of
from autofit.plan import Plan, Scalar, Settings
from autofit.planning.constants import (
    BLOCKS_WHERE_UNSURE,
    CHANGED,
    DOUBT,
    DOUBTED,
    HEADROOM,
    MOST_BLOCKS,
    MOST_GIVEN_UP,
    MOST_LOST,
    MOST_MEASURED_FASTER,
    MOST_RIVALS,
    TIE,
    UNSURE,
)
from autofit.planning.feasibility import MicroBatches
from autofit.planning.least_squares import Array
from autofit.planning.posterior import Posterior
from autofit.planning.proposals import gain_of_repeating, oom_cost
from autofit.units import format_bytes, format_rate


@dataclass(frozen=True)
class Finalist:
    """A plan in the final comparison, or as the search measured it.

    Attributes:
        plan: the plan.
        blocks: its fitting trials there, at least one.
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
    if sum(len(finalist.blocks) for finalist in compared) >= MOST_BLOCKS:
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
    searched = _searched(posterior)
    if compared:
        winner = _winner(posterior, compared)
        turns = {finalist.plan for finalist in compared}
        has_met = len(turns) > 1 and posterior.spec.space.baseline in turns
        ahead = [_ahead(posterior, plan, winner.plan) for plan in searched.keys() - turns]
        is_fastest = has_met and all(gap <= uncertain for gap, uncertain in ahead)
        if is_fastest or next_turn(posterior) is None:
            return middle_of(winner.blocks)
    fastest = max(searched.values(), key=lambda each: each.log_speed, default=None)
    if fastest is None:
        return None
    turns_of = {finalist.plan: finalist for finalist in compared}
    return middle_of(turns_of.get(fastest.plan, fastest).blocks)


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
    compared = _measured(posterior, turns=True).values()
    return sorted(compared, key=lambda finalist: -finalist.log_speed)


def _next_newcomer(posterior: Posterior, compared: Sequence[Finalist]) -> Plan | None:
    """Return the next plan to compare that has had no turn; None: all have.

    First the leader, then the baseline, then the plan that measured fastest, whatever noise is
    believed to explain; then the rivals, and what measured faster than the answer.
    """
    beliefs = {}
    for trial in posterior.fitting:
        beliefs[trial.plan] = posterior.mean_log_speed(trial.plan)
        if trial.kind is not TrialKind.CONFIRMATION:  # it need not fit again
            beliefs[trial.plan] -= float(
                oom_cost(posterior, np.array(posterior.oom_risk(trial.plan)))
            )
    if not beliefs:
        return None
    had_turn = {finalist.plan for finalist in compared}
    leader = max(beliefs, key=lambda plan: beliefs[plan])
    baseline = posterior.spec.space.baseline
    wanted = [leader, baseline] if baseline in beliefs else [leader]
    wanted.append(max(_searched(posterior).values(), key=lambda each: each.log_speed).plan)
    rivals = had_turn - {baseline}
    if len(rivals) <= MOST_RIVALS:
        others = sorted(beliefs, key=lambda plan: -beliefs[plan])
        wanted += [plan for plan in others if _gain_of_turn(posterior, plan, leader) > TIE]
    if compared and len(rivals) <= MOST_MEASURED_FASTER:
        winner = _winner(posterior, compared)
        wanted += _measured_faster(posterior, winner.plan)
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
            and min(len(each.blocks), len(winner.blocks)) < BLOCKS_WHERE_UNSURE
            and _ahead(posterior, baseline, winner.plan)[1] > UNSURE
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
        return baseline in (plan, best) or float((ahead > MOST_LOST).mean()) > DOUBT

    return [plan for plan in _searched(posterior) if plan != best and may_be_faster(plan)]


def _changed(posterior: Posterior, plan: Plan) -> bool:
    """Whether a plan's speed in the search and in the final comparison are far apart."""
    blocks = [each.blocks for each in finalists(posterior) if each.plan == plan]
    searched = _searched(posterior).get(plan)
    if not blocks or not searched:
        return False
    apart = compared_log_speed(blocks[0]) - compared_log_speed(searched.blocks)
    return abs(apart) > math.log(CHANGED)


def _ahead(posterior: Posterior, plan: Plan, other: Plan) -> tuple[float, float]:
    """Return the log by which a plan measured faster than another, and its 95 % uncertainty.

    By the blocks of both, or else by the probes of the search of both.
    """
    found = _measured(posterior, turns=True)
    if plan not in found or other not in found:
        found = _searched(posterior)
    first, second = found[plan], found[other]
    significant = posterior.errors.significant([*first.blocks, *second.blocks])
    return first.log_speed - second.log_speed, _error(posterior, first, second) * significant


def _error(posterior: Posterior, first: Finalist, second: Finalist) -> float:
    """Return the standard error of the log by which one measured faster than the other."""
    return math.hypot(*(posterior.errors.of_all(each.blocks) for each in (first, second)))


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
    return held * math.exp(HEADROOM * error) > posterior.spec.vram_budget_bytes


def _measured_faster(posterior: Posterior, than: Plan) -> list[Plan]:
    """Return plans that the search found faster than that one, by an error, the fastest first.

    Those that were compared with it are left out: blocks tell more.
    """
    searched, had_turn = _searched(posterior), _measured(posterior, turns=True)
    return [
        each.plan
        for each in sorted(searched.values(), key=lambda each: -each.log_speed)
        if each.plan not in had_turn
        and each.log_speed - searched[than].log_speed > _error(posterior, each, searched[than])
    ]


def _doubted(posterior: Posterior, best: Plan) -> list[Plan]:
    """Return larger micro-batches of the best plan's variant that measured far slower, only once.

    They do so on some devices; and where the machine was slow for a time, which no probe at other
    times shows. Once one has measured so again, the others are believed.
    """
    searched, compared = _searched(posterior), _measured(posterior, turns=True)
    if best not in searched:
        return []
    slow = searched[best].log_speed - DOUBTED
    doubted = [
        each
        for each in sorted(searched.values(), key=lambda each: -each.log_speed)
        if each.plan.variant == best.variant
        and each.plan.micro_batch > best.micro_batch
        and each.log_speed < slow
    ]
    again = [each for each in doubted if each.plan in compared or len(each.blocks) > 1]
    if any(compared.get(each.plan, each).log_speed < slow for each in again):
        return []
    return [each.plan for each in doubted if each not in again]


def _searched(posterior: Posterior) -> Mapping[Plan, Finalist]:
    """Return each plan that fits, as the search's probes have it."""
    return _measured(posterior, turns=False)


def _measured(posterior: Posterior, *, turns: bool) -> Mapping[Plan, Finalist]:
    """Return each plan that fits by its turns, or else by the probes of the search."""
    meant = (t for t in posterior.fitting if (t.kind is TrialKind.CONFIRMATION) == turns)
    found = {}
    for plan, its in by_plan(meant).items():
        start_up_s = float(posterior.start_up_s[posterior.index(plan)])
        log_speed = posterior.over_training(np.array(compared_log_speed(its)), start_up_s)
        found[plan] = Finalist(plan, tuple(its), float(log_speed))
    return found


def _gain_of_turn(posterior: Posterior, plan: Plan, other: Plan) -> float:
    """Return what another block of a plan is expected to gain in log speed.

    Chosen without it is the one of the two that is expected to be faster.
    """
    ahead = posterior.log_speed(plan) - posterior.log_speed(other)
    if ahead.mean() > 0:
        ahead = -ahead
    noise = next(posterior.errors.of(trial) for trial in posterior.fitting if trial.plan == plan)
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
