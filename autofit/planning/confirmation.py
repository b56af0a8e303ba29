"""The end of a search: the final comparison, the answer, and why values were left out.

1. Finalists are the incumbent, the baseline, the plan that measured fastest, and the plans that the
   search cannot tell from the incumbent, one with a costly value among them.
2. In each round every plan that is left runs once, in random order, in a worker that this round
   alone uses: what is faster or slower with its process or its hour is so for the whole round.
3. `autofit.rounds` says from all rounds by how much each plan is ahead of another, and how sure
   that is. The plan ahead of all others is the best; plans within `MAX_GIVEN_UP` of it tie.
4. A plan is left for another round while it may change the answer: the baseline until the best plan
   is told from it with 95%, others while they may well be faster than the best by `MAX_LOST`.
   Where none is left, the comparison ends; at the latest after `MAX_ROUNDS`. One round alone does
   not end it where the steps show that others disturb the machine.

A tie goes to the plans with headroom, then to the baseline, then to the plan that changes the
arithmetic least. Of those that are still left, the rounds may tell that some are slower than the
fastest one. It then goes to one without recomputation, to the fewest settings that are not plain,
and to the fewest bytes. A plan that wins such a tie runs again beside one that measured faster by
more than half of `MAX_GIVEN_UP`.

What cannot be told from the baseline with 95% is not recommended: then the baseline is. Where the
baseline does not fit there is nothing to tell a plan from, and the best one is recommended. A
search that was cut short is judged by the turns and probes that there were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autofit.measurement import Trial, TrialKind, by_plan, middle_of
from autofit.plan import Plan, Scalar, Settings
from autofit.planning.beliefs import Beliefs
from autofit.planning.constants import (
    MAX_GIVEN_UP,
    MAX_LOST,
    MAX_RIVALS,
    MAX_ROUNDS,
    MIN_VALUE,
    SURE,
    TINY,
)
from autofit.planning.feasibility import MicroBatches
from autofit.planning.held_bytes import expected_gain
from autofit.rounds import Rounds, rounds_of, steady_log_speed
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
            the best plan itself: whether no other plan may be faster by more than `MAX_LOST`.
    """

    best: Trial
    recommended: Trial
    is_decided: bool


def next_turn(beliefs: Beliefs) -> Plan | None:
    """Return the plan whose turn it is in the final comparison; None once it has ended."""
    rounds = rounds_of(beliefs.probes)
    for done in range(max(0, len(rounds) - 1), min(len(rounds) + 1, MAX_ROUNDS)):
        had_turn = rounds[done] if done < len(rounds) else {}
        members = _finalists(beliefs) if done == 0 else _Comparison(beliefs, done).left
        for plan in _in_order(members, beliefs.spec.seed, done):
            if plan not in had_turn:
                return plan
    return None


def best_of(beliefs: Beliefs) -> Trial | None:
    """Return the best trial, or None if nothing fits."""
    answer = answer_of(beliefs)
    return None if answer is None else answer.best


def answer_of(beliefs: Beliefs) -> Answer | None:
    """Return the answer as far as it was measured, or None if nothing fits."""
    if not beliefs.fitting:
        return None
    compared = _Comparison(beliefs)
    is_open = compared.baseline in compared.plans and bool(compared.open)
    recommended = compared.baseline if is_open else compared.best
    return Answer(_shown(beliefs, compared.best), _shown(beliefs, recommended), not compared.open)


def _shown(beliefs: Beliefs, plan: Plan) -> Trial:
    """Return the plan's fastest turn, which others disturbed least; without, its middle probe."""
    probes = [trial for trial in beliefs.fitting if trial.plan == plan]
    turns = list(filter(_is_turn, probes))
    return max(turns, key=steady_log_speed) if turns else middle_of(probes)


def _is_turn(trial: Trial) -> bool:
    return trial.kind is TrialKind.CONFIRMATION


def _in_order(members: Sequence[Plan], seed: int, done: int) -> list[Plan]:
    """Return plans in random order; in the first round those that the answer needs most begin.

    These are the incumbent and the baseline: a limit may cut that round.
    """
    shuffled = random.Random(seed + done).sample(members, len(members))
    return shuffled if done else sorted(shuffled, key=lambda plan: plan not in members[:2])


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
    had_turn = {trial.plan for trial in beliefs.fitting if _is_turn(trial)}

    def belief(plan: Plan) -> float:
        risk = 0.0 if plan in had_turn else beliefs.oom_risk(plan)
        return search.mean_log_speed(plan) - float(search.oom_cost(np.array(risk)))

    ordered = sorted(speeds, key=belief, reverse=True)
    incumbent, baseline = ordered[0], beliefs.spec.space.baseline
    fastest = max(speeds, key=lambda plan: speeds[plan])
    rivals = [p for p in ordered[1:] if _gain_of_turn(search, p, incumbent) > MIN_VALUE]
    costly = [p for p in ordered if _is_untold_costly(search, p, incumbent)]
    bases = [baseline] if baseline in speeds else []
    return list(dict.fromkeys([incumbent, *bases, fastest, *rivals[:MAX_RIVALS], *costly[:1]]))


def _is_untold_costly(search: Beliefs, plan: Plan, incumbent: Plan) -> bool:
    """Return whether a plan's value is costly and its interval overlaps the incumbent's.

    One or two probes ran with such a value, so that no line is sure of it, and much may be lost.
    """
    if not search.spec.space.is_costly(plan.settings):
        return False
    apart = search.mean_log_speed(incumbent) - search.mean_log_speed(plan)
    return apart < SURE * (search.deviation(plan) + search.deviation(incumbent))


class _Comparison:
    """What some rounds tell, and the search before them; a start counts over the whole training.

    Args:
        beliefs: of the search.
        rounds: how many of the rounds; None: all.

    Attributes:
        baseline: the plan that others are told from.
        plans: that are compared: those that had a turn and fit. While the baseline and another one
            had none, the finalists, by their probes in the search.
    """

    def __init__(self, beliefs: Beliefs, rounds: int | None = None) -> None:
        done = rounds_of(beliefs.probes)[:rounds]
        turns = {trial.number for each in done for trial in each.values()}
        probes = [t for t in beliefs.probes if not _is_turn(t) or t.number in turns]
        self._beliefs, self._done = beliefs, len(done)
        self._rounds = Rounds(probes, self._log_speed)
        self._trials = by_plan(trial for trial in probes if trial.ok)
        self.baseline, fits = beliefs.spec.space.baseline, {t.plan for t in beliefs.fitting}
        self.plans = [plan for plan in self._rounds.plans if plan in fits]
        if not self.plans or (self.baseline in fits and not {self.baseline} < set(self.plans)):
            self.plans = [plan for plan in _finalists(beliefs) if plan in self._trials]

    @cached_property
    def best(self) -> Plan:
        """The plan ahead of the others, or that wins a tie with it.

        One that is told from the baseline, if there is one: a tie may be won with fewer turns. And
        the baseline, where no plan may be faster by more than `MAX_LOST`.
        """
        best = self._winner(self.plans)
        if self.baseline not in self.plans or best == self.baseline or self._is_told(best):
            return best
        if told := [plan for plan in self.plans if self._is_told(plan)]:
            return self._winner(told)
        return best if self._may_be_faster(self.baseline) else self.baseline

    @property
    def left(self) -> list[Plan]:
        """The plans of the next round, the best first; empty: the comparison has ended.

        Beside those that leave the answer open they are those that an error of their estimate would
        make faster than the best by `MAX_LOST`: about half of the way to the end of its interval.
        And finalists that had no turn, such as those that a search found to which it returned.
        """
        new = [plan for plan in _finalists(self._beliefs) if plan not in self._rounds.plans]
        if not self.plans:
            return new
        ahead = {plan: self._rounds.ahead(plan, self.best) for plan in self.plans}
        rivals = [p for p, its in ahead.items() if (its.log + its.high) / 2 > MAX_LOST]
        rivals += [p for p in self._alike(self.best) if ahead[p].log > MAX_GIVEN_UP / 2]
        if self._rounds.is_disturbed and self._done < 2 and self.baseline in self.plans:
            rivals.append(self.baseline)
        left = dict.fromkeys([self.best, *self.open, *rivals, *new])
        return list(left) if len(left) > 1 else []

    @cached_property
    def open(self) -> list[Plan]:
        """The plans that leave the answer undecided: see `Answer`."""
        if self.baseline not in self.plans or self.best == self.baseline:
            return self._may_be_faster(self.best)
        return [] if self._is_told(self.best) else [self.baseline]

    def _winner(self, plans: Sequence[Plan]) -> Plan:
        has_baseline = self.baseline in plans
        reference = self.baseline if has_baseline else max(plans, key=self._turns_of)
        ahead = {plan: self._rounds.ahead(plan, reference).log for plan in plans}
        most = max(ahead.values())
        tied = [plan for plan in plans if most - ahead[plan] <= MAX_GIVEN_UP]
        alike = [plan for plan in self._alike(min(tied, key=self._caution)) if plan in tied]
        fastest = max(alike, key=lambda plan: ahead[plan])
        return min((p for p in alike if not self._is_slower(p, fastest)), key=self._simplicity)

    def _alike(self, plan: Plan) -> list[Plan]:
        """Return the plans between which caution does not choose."""
        return [each for each in self.plans if self._caution(each) == self._caution(plan)]

    def _is_slower(self, plan: Plan, fastest: Plan) -> bool:
        """Return whether rounds tell that a plan is slower, by half of the way to their interval.

        No more is asked between two plans that are both told from the baseline.
        """
        ahead = self._rounds.ahead(fastest, plan)
        return (ahead.log + ahead.low) / 2 > 0

    def _caution(self, plan: Plan) -> tuple[bool, bool, int]:
        """Return a key of plans that tie: less is safer, whatever their speed."""
        space, numerics = self._beliefs.spec.space, self._beliefs.spec.numerics
        changes = max((numerics.get(name, 0) for name in self._changed(plan)), default=0)
        return _lacks_headroom(self._beliefs, self._trials[plan]), plan != space.baseline, changes

    def _simplicity(self, plan: Plan) -> tuple[bool, int, int]:
        """Return a key of plans that are equally fast and safe: less is simpler."""
        known, variant = self._beliefs.known, self._beliefs.index(plan)
        recomputes = bool(known.without_recomputation[variant] != variant)
        return recomputes, len(self._changed(plan)), max(map(_held_bytes, self._trials[plan]))

    def _changed(self, plan: Plan) -> list[str]:
        plain = self._beliefs.spec.space.default_settings
        return [name for name, value in plan.settings.items() if plain.get(name) != value]

    def _is_told(self, plan: Plan) -> bool:
        """Return whether a plan is faster than the baseline."""
        return self._rounds.ahead(plan, self.baseline).low > 0

    def _may_be_faster(self, best: Plan) -> list[Plan]:
        """Return the plans that may be faster than the best by more than `MAX_LOST`."""
        return [plan for plan in self.plans if self._rounds.ahead(plan, best).high > MAX_LOST]

    def _turns_of(self, plan: Plan) -> int:
        return sum(map(_is_turn, self._trials[plan]))

    def _log_speed(self, trial: Trial) -> float:
        start_up_s = float(self._beliefs.start_up_s[self._beliefs.index(trial.plan)])
        log_speed = np.array(steady_log_speed(trial))
        return float(self._beliefs.over_training(log_speed, start_up_s))


def _lacks_headroom(beliefs: Beliefs, trials: Sequence[Trial]) -> bool:
    """Return whether a plan may not fit again, as far as held bytes differ from run to run.

    Its bytes stray by `HeldBytes.error`; two such deviations below the budget, about 98%
    of all runs fit.
    """
    held = max(map(_held_bytes, trials))
    error = beliefs.held.error(held) if held else 0.0
    return held * math.exp(SURE * error) > beliefs.spec.vram_budget_bytes


def _gain_of_turn(beliefs: Beliefs, plan: Plan, other: Plan) -> float:
    """Return what another probe of a plan is expected to gain in log speed.

    Chosen without it is the one of the two that is expected to be faster.
    """
    mean, deviation = beliefs.ahead(plan, other)
    noise = next(beliefs.errors.of(trial) for trial in beliefs.fitting if trial.plan == plan)
    told = deviation**2 / max(math.hypot(deviation, noise), TINY)
    return float(expected_gain(np.array([-abs(mean)]), np.array([told]))[0])


def _held_bytes(trial: Trial) -> int:
    """Return what a trial held.

    0 if unknown, as in a study of the user's own without constraints.
    """
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
    cost_s = min(float(beliefs.trial_costs_s[i]) for i in fitting)
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
