"""The end of a search: which plans to measure again, and which trial is the answer.

The leading plan is run again in a fresh worker at its full accumulation. Another plan is run again
beside it where the two may be tied: then the one that needs less memory wins. Whatever is returned
was itself run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autofit.measurement import Role, Trial
from autofit.plan import Plan
from autofit.searching.beliefs import Beliefs, beliefs_of
from autofit.searching.facts import SearchFacts
from autofit.searching.proposals import oom_cost

TIE = 0.005
"""Plans nearer to each other than this, as a share of their speed, are equally fast."""

_LESS_MEMORY = 0.95  # a rival worth another probe holds at most so much of what the leader holds
_DOUBT = 0.35  # and so is one that is faster with more than this probability
_MOST_CONFIRMED = 2


def confirm(facts: SearchFacts, trials: Sequence[Trial]) -> Plan | None:
    """The leading plan to measure again next; None when the answer is confirmed."""
    beliefs = beliefs_of(facts, trials)
    contenders = _by_speed(beliefs, beliefs.fitting)
    confirmed = {t.plan for t in beliefs.probes if t.role is Role.CONFIRMED and t.ok}
    if not contenders or len(confirmed) >= _MOST_CONFIRMED:
        return None
    leader, *others = sorted(contenders, key=lambda trial: -_promise(beliefs, trial))
    if leader.plan not in confirmed:
        return leader.plan
    rivals = [trial for trial in others if _may_win(beliefs, trial, leader)]
    return next((trial.plan for trial in rivals if trial.plan not in confirmed), None)


def best_of(facts: SearchFacts, trials: Sequence[Trial]) -> Trial | None:
    """The trial to return: of those as fast as the fastest, the one that holds least.

    Confirmed trials alone are asked; where there is none, all that fit. None: nothing fits.
    """
    beliefs = beliefs_of(facts, trials)
    contenders = beliefs.fitting
    confirmed = [trial for trial in contenders if trial.role is Role.CONFIRMED]
    ranked = _by_speed(beliefs, confirmed or contenders)
    tied = [trial for trial in ranked if _lead(beliefs, ranked[0], trial) <= TIE]
    return min(tied, key=_held, default=None)


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
