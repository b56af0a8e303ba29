"""The end of a search: the final comparison, the answer, and why values were left out.

The comparison has rounds. In each one the finalists run once, in fresh workers, at their full
accumulation, in random order: first the plan that is expected to be the fastest, the baseline, and
the plans that the search cannot tell from it; later those that may still change the answer.
`autofit.rounds` says what the rounds tell of each pair of plans. A round is the last one when the
best plan is told from the baseline and no other plan is likely to be faster by `MOST_LOST`, or when
it is the fourth; one alone does not decide where the steps show that others disturb the machine.

Measured speeds decide, never a line: the plan that is ahead of all others is the best. Plans within
`MOST_GIVEN_UP` of it are tied with it. A tie goes to the plans with headroom, then to the baseline,
then to the plan that changes the arithmetic least, has the fewest settings that are not plain, and
holds the fewest bytes.

What cannot be told from the baseline with 95 % is not recommended: then the baseline is. Where the
baseline does not fit there is nothing to tell a plan from, and the best one is recommended. A
search that was cut short is judged by the turns and probes that there were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autofit.measurement import Trial, TrialKind, by_plan, middle_of
from autofit.plan import Plan, Scalar, Settings
from autofit.planning.beliefs import Beliefs
from autofit.planning.constants import (
    HEADROOM,
    MOST_GIVEN_UP,
    MOST_LOST,
    MOST_RIVALS,
    MOST_ROUNDS,
    TIE,
    TINY,
)
from autofit.planning.feasibility import MicroBatches
from autofit.planning.held_bytes import expected_gain
from autofit.rounds import Estimate, Rounds, rounds_of, steady_log_speed
from autofit.units import format_bytes, format_rate


@dataclass(frozen=True)
class Answer:
    """The answer of a search.

    Attributes:
        best: a trial of the plan that measured fastest, or that won a tie: its fastest turn of the
            final comparison, if it was in it.
        recommended: of the plan to train with: the best, or the baseline where these cannot be told
            apart.
        is_decided: whether the best plan was told from the baseline. Where that does not fit, or is
            the best plan itself: whether no other plan may be faster by more than `MOST_LOST`.
    """

    best: Trial
    recommended: Trial
    is_decided: bool


def next_turn(beliefs: Beliefs) -> Plan | None:
    """Return the plan whose turn it is in the final comparison; None once it has ended."""
    rounds = rounds_of(beliefs.probes)
    for done in range(max(0, len(rounds) - 1), min(len(rounds) + 1, MOST_ROUNDS)):
        had_turn = rounds[done] if done < len(rounds) else {}
        members = _in_order(_members(beliefs, rounds[:done]), beliefs.spec.seed + done)
        left = [plan for plan in members if plan not in had_turn]
        if left:
            return left[0]
    return None


def best_of(beliefs: Beliefs) -> Trial | None:
    """Return the best trial; None: nothing fits."""
    answer = answer_of(beliefs)
    return None if answer is None else answer.best


def answer_of(beliefs: Beliefs) -> Answer | None:
    """Return the answer as far as it was measured; None: nothing fits."""
    probes, baseline = by_plan(beliefs.fitting), beliefs.spec.space.baseline
    if not probes:
        return None
    comparison = _Comparison(beliefs, beliefs.fitting)
    compared = [plan for plan in comparison.turns if plan in probes]
    if not compared or (baseline in probes and not {baseline} < set(compared)):
        compared = _finalists(beliefs)
    best = comparison.winner(compared)

    def trial_of(plan: Plan) -> Trial:
        turns = [trial for trial in probes[plan] if trial.kind is TrialKind.CONFIRMATION]
        return max(turns, key=steady_log_speed) if turns else middle_of(probes[plan])

    has_baseline = baseline in compared
    if has_baseline and best != baseline:
        told = [plan for plan in compared if comparison.is_told_from(plan, baseline)]
        is_decided = bool(told)
        if told and best not in told:  # it won a tie, with fewer turns
            best = comparison.winner(told)
        if not is_decided and not comparison.may_be_faster(baseline, compared):
            best, is_decided = baseline, True
    else:
        is_decided = not comparison.may_be_faster(best, compared)
    is_safe = is_decided or not has_baseline
    return Answer(trial_of(best), trial_of(best if is_safe else baseline), is_decided)


def _members(beliefs: Beliefs, rounds: Sequence[Mapping[Plan, Trial]]) -> list[Plan]:
    """Return the plans of the round after these, the two that matter most first.

    Of the first round, all finalists, one alone too, since it has to fit again. Later the plan
    ahead and those that may change the answer; and finalists that had no turn, such as those that a
    search found to which it returned.
    """
    finalists = _finalists(beliefs)
    if not rounds:
        return finalists
    before = [trial for each in rounds for trial in each.values()]
    searched = [trial for trial in beliefs.fitting if trial.kind is not TrialKind.CONFIRMATION]
    fits = {trial.plan for trial in beliefs.fitting}
    comparison = _Comparison(beliefs, [*searched, *(t for t in before if t.plan in fits)])
    compared = [plan for plan in comparison.turns if plan in fits]
    if not compared:
        return finalists
    ahead, baseline = comparison.winner(compared), beliefs.spec.space.baseline
    if baseline in compared and ahead != baseline:
        is_told = comparison.is_told_from(ahead, baseline)
        is_last = is_told and not (comparison.is_disturbed and len(rounds) < 2)
        still = [] if is_last else [baseline]
        still += comparison.gains(ahead, [plan for plan in compared if plan != baseline])
    else:
        still = comparison.may_be_faster(ahead, compared)
    still += [plan for plan in finalists if plan not in comparison.turns]
    return [ahead, *still] if still else []


def _in_order(members: Sequence[Plan], seed: int) -> list[Plan]:
    """Return plans in random order, but for the first two, which a short comparison needs most."""
    draw = random.Random(seed)
    first, others = list(members[:2]), list(members[2:])
    draw.shuffle(first)
    draw.shuffle(others)
    return [*first, *others]


def _finalists(beliefs: Beliefs) -> list[Plan]:
    """Return the plans of the first round: by what the search believes and measured.

    The incumbent, less what the risk costs that it does not fit again, and the baseline; then the
    plan that measured fastest, whatever noise is believed to explain, and the incumbent's rivals.
    """
    search, fits = beliefs.of_search, {trial.plan for trial in beliefs.fitting}
    speeds = {
        plan: max(map(steady_log_speed, trials))
        for plan, trials in by_plan(search.fitting).items()
        if plan in fits
    }
    if not speeds:
        return list(fits)
    had_turn = {trial.plan for trial in beliefs.fitting if trial.kind is TrialKind.CONFIRMATION}

    def belief(plan: Plan) -> float:
        risk = 0.0 if plan in had_turn else beliefs.oom_risk(plan)
        return search.mean_log_speed(plan) - float(search.oom_cost(np.array(risk)))

    ordered = sorted(speeds, key=belief, reverse=True)
    incumbent, baseline = ordered[0], beliefs.spec.space.baseline
    fastest = max(speeds, key=lambda plan: speeds[plan])
    rivals = [plan for plan in ordered[1:] if _gain_of_turn(search, plan, incumbent) > TIE]
    wanted = [
        incumbent,
        *([baseline] if baseline in speeds else []),
        fastest,
        *rivals[:MOST_RIVALS],
    ]
    return list(dict.fromkeys(wanted))


class _Comparison:
    """Plans beside one another, their start over the whole training included.

    Args:
        beliefs: of the search.
        trials: that tell of their speeds.

    Attributes:
        turns: the plans that had a turn.
        is_disturbed: whether work of others shows in the steps of the probes.
    """

    def __init__(self, beliefs: Beliefs, trials: Sequence[Trial]) -> None:
        self._beliefs, self._trials = beliefs, by_plan(trials)
        self._rounds = Rounds(trials, self._log_speed)
        self.turns, self.is_disturbed = self._rounds.plans, self._rounds.is_disturbed

    def winner(self, plans: Sequence[Plan]) -> Plan:
        """Return the plan ahead of the others, or that wins a tie with it."""
        baseline = self._beliefs.spec.space.baseline
        reference = baseline if baseline in plans else max(plans, key=self._turns_of)
        ahead = {plan: self._ahead(plan, reference).log for plan in plans}
        most = max(ahead.values())
        tied = [plan for plan in plans if most - ahead[plan] <= MOST_GIVEN_UP]
        return min(tied, key=lambda plan: _preference(self._beliefs, self._trials[plan]))

    def is_told_from(self, best: Plan, other: Plan) -> bool:
        """Return whether a plan is faster than another."""
        return self._ahead(best, other).low > 0

    def may_be_faster(self, best: Plan, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans that may be faster than the best by more than `MOST_LOST`."""
        return [plan for plan in plans if plan != best and self._ahead(plan, best).high > MOST_LOST]

    def gains(self, best: Plan, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans that an error of their estimate would make faster by `MOST_LOST`.

        That is about half of the way to the end of its interval. They change by how much the answer
        is faster than the baseline, and not whether it is.
        """
        found = ((plan, self._ahead(plan, best)) for plan in plans if plan != best)
        return [plan for plan, ahead in found if (ahead.log + ahead.high) / 2 > MOST_LOST]

    def _ahead(self, plan: Plan, other: Plan) -> Estimate:
        return Estimate(0.0, 0.0, 0.0) if plan == other else self._rounds.ahead(plan, other)

    def _turns_of(self, plan: Plan) -> int:
        return sum(trial.kind is TrialKind.CONFIRMATION for trial in self._trials[plan])

    def _log_speed(self, trial: Trial) -> float:
        start_up_s = float(self._beliefs.start_up_s[self._beliefs.index(trial.plan)])
        log_speed = np.array(steady_log_speed(trial))
        return float(self._beliefs.over_training(log_speed, start_up_s))


def _preference(beliefs: Beliefs, trials: Sequence[Trial]) -> tuple[bool, bool, int, int, int]:
    """Return a key that orders equally fast plans, the most welcome first."""
    space, plan = beliefs.spec.space, trials[0].plan
    plain = space.default_settings
    changed = [name for name, value in plan.settings.items() if plain.get(name) != value]
    numerics = max((beliefs.spec.numerics.get(name, 0) for name in changed), default=0)
    return (
        _lacks_headroom(beliefs, trials),
        plan != space.baseline,
        numerics,
        len(changed),
        max(map(_held_bytes, trials)),
    )


def _lacks_headroom(beliefs: Beliefs, trials: Sequence[Trial]) -> bool:
    """Return whether a plan may not fit again, as far as held bytes differ from run to run.

    Its bytes stray by `HeldBytes.error`; two such deviations below the budget, about 98 %
    of all runs fit.
    """
    held = max(map(_held_bytes, trials))
    error = beliefs.held.error(held) if held else 0.0
    return held * math.exp(HEADROOM * error) > beliefs.spec.vram_budget_bytes


def _gain_of_turn(beliefs: Beliefs, plan: Plan, other: Plan) -> float:
    """Return what another probe of a plan is expected to gain in log speed.

    Chosen without it is the one of the two that is expected to be faster.
    """
    mean, deviation = beliefs.ahead(plan, other)
    noise = next(beliefs.errors.of(trial) for trial in beliefs.fitting if trial.plan == plan)
    told = deviation**2 / max(math.hypot(deviation, noise), TINY)
    return float(expected_gain(np.array([-abs(mean)]), np.array([told]))[0])


def _held_bytes(trial: Trial) -> int:
    """Return what a trial held; 0: unknown, as in a study of the user's own without constraints."""
    return trial.measurement.held_bytes or 0


def left_out(beliefs: Beliefs) -> list[tuple[Settings, str]]:
    """Return settings that were left out, each with the reason.

    First those that faults exclude, then each value of a setting that was never run.
    """
    excluded = [(dict(pairs), why) for pairs, why in beliefs.exclusions.blamed.items()]
    sizes = beliefs.cautious
    run = {pair for trial in beliefs.probes for pair in trial.plan.variant}
    never = [
        ({name: value}, why)
        for name, dimension in beliefs.spec.space.dimensions.items()
        for value in dimension.values
        if (name, value) not in run and (why := _why_not_run(beliefs, name, value, sizes))
    ]
    return [*excluded, *never]


def _why_not_run(beliefs: Beliefs, name: str, value: Scalar, sizes: MicroBatches) -> str | None:
    """Return why that value was not run; None if all its variants are excluded.

    Args:
        beliefs: after the search.
        name, value: the setting and its value.
        sizes: the expected ceiling of each variant.
    """
    has_value = np.array([settings[name] == value for settings in beliefs.variants])
    variants = np.flatnonzero(has_value & beliefs.usable)
    if not len(variants):
        return None
    incumbent = beliefs.incumbent
    fitting = variants[sizes[variants] >= 1]
    if not len(fitting) or incumbent is None:
        return _why_too_large(beliefs, variants.tolist())
    speeds, times = beliefs.speeds(fitting, sizes[fitting])
    at = int(speeds.argmax())
    best, deviation = float(speeds[at]), math.sqrt(float(times.variance[at]))
    ahead = beliefs.mean_log_speed(incumbent.plan)
    cost_s = min(float(beliefs.known.trial_costs_s[i]) for i in fitting)
    if cost_s > 0 and beliefs.spec.planned_samples:
        return _why_costly(beliefs, best, float(beliefs.start_up_s[fitting[at]]), cost_s)
    own, of_best = _rate(best, deviation), _rate(ahead, beliefs.deviation(incumbent.plan))
    beside = f"and the best plan reaches {of_best}"
    if own == of_best:
        beside = f"{'no' if best <= ahead else 'hardly'} faster than the best plan"
    early = "" if best <= ahead else "not tried before the search stopped: "
    return f"{early}predicted to reach {own} at most, {beside}"


def _why_costly(beliefs: Beliefs, best: float, start_up_s: float, cost_s: float) -> str:
    """Return what a costly value that was not tried is expected to save and to take.

    Args:
        beliefs: after the search.
        best: log samples/s of its best plan over the whole training, its start included.
        start_up_s: that start.
        cost_s: seconds more to try it.
    """
    assert beliefs.incumbent is not None
    samples = beliefs.spec.planned_samples or 0
    steps = round(samples / beliefs.spec.space.baseline.samples_per_step)
    without_s = samples / math.exp(beliefs.mean_log_speed(beliefs.incumbent.plan))
    saved_s = without_s - samples / math.exp(best) + start_up_s
    takes = f"takes about {cost_s:.0f} s to try"
    if saved_s <= 0:
        return f"expected to save nothing over {steps:,} steps, and {takes}"
    early = "not tried before the search stopped: " if saved_s > cost_s else ""
    return f"{early}expected to save about {saved_s:,.0f} s over {steps:,} steps, and {takes}"


def _rate(log_speed: float, deviation: float) -> str:
    """Return log samples/s, with the digits that their deviation supports."""
    speed = math.exp(log_speed)
    return format_rate(speed, deviation * speed)


def _why_too_large(beliefs: Beliefs, variants: Sequence[int]) -> str:
    """Return the reason if no plan of those variants is predicted to fit."""
    space, smallest = beliefs.spec.space, beliefs.sizes.smallest
    plans = [space.plan(int(smallest[i]), beliefs.variants[i]) for i in variants]
    held_bytes = [beliefs.held.quantile(plan) for plan in plans]
    held, plan = min(zip(held_bytes, plans, strict=True), key=lambda pair: pair[0])
    return (
        f"predicted to hold {format_bytes(held)} at micro-batch {plan.micro_batch} where "
        f"{format_bytes(beliefs.spec.vram_budget_bytes)} are allowed"
    )
