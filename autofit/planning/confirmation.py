"""The end of a search: which plans to measure again, and which trial is the answer.

The leading plan is run again in a fresh worker at its full accumulation. Another plan is run again
beside it where the two may be tied: then the one that needs less memory wins. Where the machine's
speed has changed since the search, or the answer is measured no better than the baseline, so is the
baseline: it is the answer itself where it is no slower and holds no more. Whatever is returned was
itself run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from autofit.measurement import Role, Trial
from autofit.plan import Plan
from autofit.planning.planner import oom_cost
from autofit.planning.posterior import Beliefs

TIE = 0.005
"""Plans nearer to each other than this, as a share of their speed, are equally fast."""

_LESS_MEMORY = 0.95  # a rival worth another probe holds at most so much of what the leader holds
_DOUBT = 0.35  # and so is one that is faster with more than this probability
_MOST_CONFIRMED = 3
_DRIFT = 0.05
"""A gap between two measurements of a plan, beyond both intervals, that noise does not explain."""


def confirm(beliefs: Beliefs) -> Plan | None:
    """The leading plan to measure again next; None when the answer is confirmed."""
    confirmed = {t.plan for t in beliefs.probes if t.role is Role.CONFIRMED and t.ok}
    if len(confirmed) < _MOST_CONFIRMED:
        plan = _leading(beliefs, confirmed)
        if plan is not None:
            return plan
    baseline = beliefs.probes[0] if beliefs.probes else None
    if baseline is None or not baseline.ok or not confirmed or baseline.plan in confirmed:
        return None
    best = best_of(beliefs)
    doubtful = best is None or best.role is not Role.CONFIRMED or _is_worse(best, baseline)
    return baseline.plan if doubtful or _has_drifted(beliefs) else None


def best_of(beliefs: Beliefs) -> Trial | None:
    """The trial to return: of those as fast as the fastest, the one that holds least.

    Confirmed trials alone are asked; where there is none, all that fit. None: nothing fits. Where
    none of them is any better than the baseline, it is the baseline, even if the search was cut
    short before that was confirmed.
    """
    contenders = beliefs.fitting
    confirmed = [trial for trial in contenders if trial.role is Role.CONFIRMED]
    plain = [trial for trial in contenders if trial.plan == beliefs.facts.space.baseline]
    if confirmed and plain:
        no_worse = [trial for trial in confirmed if not _has_lost(beliefs, trial, plain[-1])]
        confirmed = no_worse or plain[-1:]
    ranked = _by_speed(beliefs, confirmed or contenders)
    tied = [trial for trial in ranked if _lead(beliefs, ranked[0], trial) <= TIE]
    return min(tied, key=_held, default=None)


def _leading(beliefs: Beliefs, confirmed: set[Plan]) -> Plan | None:
    """The leader, then what may be tied with it; None where all of these were confirmed."""
    contenders = _by_speed(beliefs, beliefs.fitting)
    if not contenders:
        return None
    leader, *others = sorted(contenders, key=lambda trial: -_promise(beliefs, trial))
    if leader.plan not in confirmed:
        return leader.plan
    measured = max(contenders, key=lambda trial: _rate(beliefs, trial.plan))
    rivals = [measured] if _beats(beliefs, measured, leader) else []
    rivals += [trial for trial in others if _may_win(beliefs, trial, leader)]
    return next((trial.plan for trial in rivals if trial.plan not in confirmed), None)


def _rate(beliefs: Beliefs, plan: Plan) -> float:
    """The plan's median samples per second over its probes."""
    return statistics.median(
        t.samples_per_second or 0.0 for t in beliefs.probes if t.plan == plan and t.ok
    )


def _beats(beliefs: Beliefs, rival: Trial, leader: Trial) -> bool:
    """Whether a plan was measured so much faster that no belief may pass it over."""
    return _rate(beliefs, rival.plan) > _rate(beliefs, leader.plan) * (1 + _DRIFT)


def _has_drifted(beliefs: Beliefs) -> bool:
    """Whether a confirmation ran at another speed than the plan's own search probe.

    Then the machine's speed has changed meanwhile, and nothing measured before can be set beside
    what was measured since: not the baseline either.
    """
    searched = {t.plan: t for t in beliefs.probes if t.role is not Role.CONFIRMED and t.ok}
    pairs = [
        (searched[t.plan], t)
        for t in beliefs.probes
        if t.role is Role.CONFIRMED and t.ok and t.plan in searched
    ]
    return any(_differ(before, after) for before, after in pairs)


def _differ(before: Trial, after: Trial) -> bool:
    slower, faster = sorted((before, after), key=lambda t: t.samples_per_second or 0.0)
    high, low = slower.samples_per_second_high, faster.samples_per_second_low
    return high is not None and low is not None and high * (1 + _DRIFT) < low


def _has_lost(beliefs: Beliefs, trial: Trial, baseline: Trial) -> bool:
    """Whether a confirmed plan is worse than the baseline, as far as the two can be compared.

    Where the baseline was not confirmed beside it, all of the plan's measurements speak.
    """
    side_by_side = baseline.role is Role.CONFIRMED
    rate = baseline.samples_per_second or 0.0
    return _is_worse(trial, baseline) and (side_by_side or _rate(beliefs, trial.plan) < rate)


def _is_worse(trial: Trial, baseline: Trial) -> bool:
    """Whether it was measured slower, and neither measurement error nor less memory excuses it."""
    slower = (trial.samples_per_second or 0.0) < (baseline.samples_per_second or 0.0)
    excused = trial.ties_with(baseline) and _held(trial) < _held(baseline)
    return trial.plan != baseline.plan and slower and not excused


def _by_speed(beliefs: Beliefs, trials: Sequence[Trial]) -> list[Trial]:
    """The last trial of each plan, the fastest first."""
    last = {trial.plan: trial for trial in trials}
    return sorted(last.values(), key=lambda t: -float(beliefs.speed(t.plan).mean()))


def _promise(beliefs: Beliefs, trial: Trial) -> float:
    """The speed that is expected, less what it may cost that the plan does not fit again."""
    cost = 0.0
    if trial.role is not Role.CONFIRMED:
        cost = float(oom_cost(beliefs, np.array(beliefs.risk(trial.plan))))
    return float(beliefs.speed(trial.plan).mean()) - cost


def _lead(beliefs: Beliefs, leader: Trial, other: Trial) -> float:
    """By how much the leader is expected to be faster, as a logarithm."""
    return float((beliefs.speed(leader.plan) - beliefs.speed(other.plan)).mean())


def _may_win(beliefs: Beliefs, rival: Trial, leader: Trial) -> bool:
    """Whether another look may change the answer."""
    if _held(rival) <= _LESS_MEMORY * _held(leader) and _lead(beliefs, leader, rival) <= TIE:
        return True
    faster = beliefs.speed(rival.plan) > beliefs.speed(leader.plan) + TIE
    return float(faster.mean()) > _DOUBT


def _held(trial: Trial) -> int:
    held = trial.measurement.held_bytes
    assert held is not None, "a trial that fits says what it held"
    return held
