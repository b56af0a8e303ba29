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
from autofit.planning.posterior import Posterior

TIE = 0.005
"""Plans nearer to each other than this, as a share of their speed, are equally fast."""

_LESS_MEMORY = 0.95  # a rival worth another probe holds at most so much of what the leader holds
_DOUBT = 0.35  # and so is one that is faster with more than this probability
_MOST_CONFIRMED = 3
_DRIFT = 0.05
"""A gap between two measurements of a plan, beyond both intervals, that noise does not explain."""


def confirm(posterior: Posterior) -> Plan | None:
    """The leading plan to measure again next; None when the answer is confirmed."""
    confirmed = {t.plan for t in posterior.probes if t.role is Role.CONFIRMED and t.ok}
    if len(confirmed) < _MOST_CONFIRMED:
        plan = _leading(posterior, confirmed)
        if plan is not None:
            return plan
    baseline = posterior.probes[0] if posterior.probes else None
    if baseline is None or not baseline.ok or not confirmed or baseline.plan in confirmed:
        return None
    best = best_of(posterior)
    doubtful = best is None or best.role is not Role.CONFIRMED or _is_worse(best, baseline)
    return baseline.plan if doubtful or _has_drifted(posterior) else None


def best_of(posterior: Posterior) -> Trial | None:
    """The trial to return: of those as fast as the fastest, the one that holds least.

    Confirmed trials alone are asked; where there is none, all that fit. None: nothing fits. Where
    none of them is any better than the baseline, it is the baseline, even if the search was cut
    short before that was confirmed.
    """
    contenders = posterior.fitting
    confirmed = [trial for trial in contenders if trial.role is Role.CONFIRMED]
    plain = [trial for trial in contenders if trial.plan == posterior.spec.space.baseline]
    if confirmed and plain:
        no_worse = [trial for trial in confirmed if not _has_lost(posterior, trial, plain[-1])]
        confirmed = no_worse or plain[-1:]
    ranked = _by_speed(posterior, confirmed or contenders)
    tied = [trial for trial in ranked if _lead(posterior, ranked[0], trial) <= TIE]
    return min(tied, key=_held, default=None)


def _leading(posterior: Posterior, confirmed: set[Plan]) -> Plan | None:
    """The leader, then what may be tied with it; None where all of these were confirmed."""
    contenders = _by_speed(posterior, posterior.fitting)
    if not contenders:
        return None
    leader, *others = sorted(contenders, key=lambda trial: -_promise(posterior, trial))
    if leader.plan not in confirmed:
        return leader.plan
    measured = max(contenders, key=lambda trial: _rate(posterior, trial.plan))
    rivals = [measured] if _beats(posterior, measured, leader) else []
    rivals += [trial for trial in others if _may_win(posterior, trial, leader)]
    return next((trial.plan for trial in rivals if trial.plan not in confirmed), None)


def _rate(posterior: Posterior, plan: Plan) -> float:
    """The plan's median samples per second over its probes."""
    return statistics.median(
        t.samples_per_second or 0.0 for t in posterior.probes if t.plan == plan and t.ok
    )


def _beats(posterior: Posterior, rival: Trial, leader: Trial) -> bool:
    """Whether a plan was measured so much faster that no belief may pass it over."""
    return _rate(posterior, rival.plan) > _rate(posterior, leader.plan) * (1 + _DRIFT)


def _has_drifted(posterior: Posterior) -> bool:
    """Whether a confirmation ran at another speed than the plan's own search probe.

    Then the machine's speed has changed meanwhile, and nothing measured before can be set beside
    what was measured since: not the baseline either.
    """
    searched = {t.plan: t for t in posterior.probes if t.role is not Role.CONFIRMED and t.ok}
    pairs = [
        (searched[t.plan], t)
        for t in posterior.probes
        if t.role is Role.CONFIRMED and t.ok and t.plan in searched
    ]
    return any(_differ(before, after) for before, after in pairs)


def _differ(before: Trial, after: Trial) -> bool:
    slower, faster = sorted((before, after), key=lambda t: t.samples_per_second or 0.0)
    high, low = slower.samples_per_second_high, faster.samples_per_second_low
    return high is not None and low is not None and high * (1 + _DRIFT) < low


def _has_lost(posterior: Posterior, trial: Trial, baseline: Trial) -> bool:
    """Whether a confirmed plan is worse than the baseline, as far as the two can be compared.

    Where the baseline was not confirmed beside it, all of the plan's measurements speak.
    """
    side_by_side = baseline.role is Role.CONFIRMED
    rate = baseline.samples_per_second or 0.0
    return _is_worse(trial, baseline) and (side_by_side or _rate(posterior, trial.plan) < rate)


def _is_worse(trial: Trial, baseline: Trial) -> bool:
    """Whether it was measured slower, and neither measurement error nor less memory excuses it."""
    slower = (trial.samples_per_second or 0.0) < (baseline.samples_per_second or 0.0)
    excused = trial.ties_with(baseline) and _held(trial) < _held(baseline)
    return trial.plan != baseline.plan and slower and not excused


def _by_speed(posterior: Posterior, trials: Sequence[Trial]) -> list[Trial]:
    """The last trial of each plan, the fastest first."""
    last = {trial.plan: trial for trial in trials}
    return sorted(last.values(), key=lambda t: -float(posterior.log_speed(t.plan).mean()))


def _promise(posterior: Posterior, trial: Trial) -> float:
    """The speed that is expected, less what it may cost that the plan does not fit again."""
    cost = 0.0
    if trial.role is not Role.CONFIRMED:
        cost = float(oom_cost(posterior, np.array(posterior.oom_risk(trial.plan))))
    return float(posterior.log_speed(trial.plan).mean()) - cost


def _lead(posterior: Posterior, leader: Trial, other: Trial) -> float:
    """By how much the leader is expected to be faster, as a logarithm."""
    return float((posterior.log_speed(leader.plan) - posterior.log_speed(other.plan)).mean())


def _may_win(posterior: Posterior, rival: Trial, leader: Trial) -> bool:
    """Whether another look may change the answer."""
    if _held(rival) <= _LESS_MEMORY * _held(leader) and _lead(posterior, leader, rival) <= TIE:
        return True
    faster = posterior.log_speed(rival.plan) > posterior.log_speed(leader.plan) + TIE
    return float(faster.mean()) > _DOUBT


def _held(trial: Trial) -> int:
    held = trial.measurement.held_bytes
    assert held is not None, "a trial that fits says what it held"
    return held
