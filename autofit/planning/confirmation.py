"""The end of a search: which plans to measure again, the answer, and why values were left out.

The leading plan is run again in a fresh worker at its full accumulation. Another plan is run again
too if the two may be tied; of tied plans the one that needs less memory wins. If the machine's
speed has changed since the search, or the answer measures no better than the baseline, the baseline
is run again as well, and is the answer itself if it is no slower and holds no more. The answer was
always itself run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from autofit.measurement import Role, Trial
from autofit.plan import Plan, Scalar, Settings
from autofit.planning.feasibility import MicroBatches
from autofit.planning.planner import ceilings, leading, oom_cost
from autofit.planning.posterior import Posterior
from autofit.units import format_bytes, format_rate

TIE = 0.005
"""Plans whose log speeds are nearer to each other than this are equally fast."""

_LESS_MEMORY = 0.95  # a tied rival is confirmed if it holds at most this share of the bytes
_MAY_WIN = 0.35  # a rival is confirmed if it is faster with more than this probability
_MOST_CONFIRMED = 3
_DRIFT = 0.05
"""A relative gap between two measurements of a plan, beyond both intervals, that is not noise."""


def confirm(posterior: Posterior) -> Plan | None:
    """Return the plan to measure again next; None once the answer is confirmed."""
    confirmed = {t.plan for t in posterior.probes if t.role is Role.CONFIRMED and t.ok}
    if len(confirmed) < _MOST_CONFIRMED:
        plan = _unconfirmed_contender(posterior, confirmed)
        if plan is not None:
            return plan
    baseline = posterior.probes[0] if posterior.probes else None
    if baseline is None or not baseline.ok or not confirmed or baseline.plan in confirmed:
        return None
    best = best_of(posterior)
    unclear = best is None or best.role is not Role.CONFIRMED or _is_worse(best, baseline)
    return baseline.plan if unclear or _has_drifted(posterior) else None


def best_of(posterior: Posterior) -> Trial | None:
    """Return the answer: of the trials as fast as the fastest, the one that holds least.

    Only confirmed trials are candidates, or all that fit if none was confirmed. None: nothing fits.
    If no candidate is better than the baseline, the answer is the baseline, even if the search was
    cut short before that was confirmed.
    """
    contenders = posterior.fitting
    confirmed = [trial for trial in contenders if trial.role is Role.CONFIRMED]
    plain = [trial for trial in contenders if trial.plan == posterior.spec.space.baseline]
    if confirmed and plain:
        no_worse = [trial for trial in confirmed if not _has_lost(posterior, trial, plain[-1])]
        confirmed = no_worse or plain[-1:]
    ranked = _by_speed(posterior, confirmed or contenders)
    tied = [trial for trial in ranked if _lead(posterior, ranked[0], trial) <= TIE]
    return min(tied, key=_held_bytes, default=None)


def _unconfirmed_contender(posterior: Posterior, confirmed: set[Plan]) -> Plan | None:
    """Return the leader, then a plan that may be tied with it; None once all were confirmed."""
    contenders = _by_speed(posterior, posterior.fitting)
    if not contenders:
        return None
    leader, *others = sorted(contenders, key=lambda trial: -_expected_value(posterior, trial))
    if leader.plan not in confirmed:
        return leader.plan
    measured = max(contenders, key=lambda trial: _rate(posterior, trial.plan))
    rivals = [measured] if _was_much_faster(posterior, measured, leader) else []
    rivals += [trial for trial in others if _may_win(posterior, trial, leader)]
    return next((trial.plan for trial in rivals if trial.plan not in confirmed), None)


def _rate(posterior: Posterior, plan: Plan) -> float:
    """Return the plan's median samples per second over its probes."""
    return statistics.median(
        t.samples_per_second or 0.0 for t in posterior.probes if t.plan == plan and t.ok
    )


def _was_much_faster(posterior: Posterior, rival: Trial, leader: Trial) -> bool:
    """Return whether a plan measured so much faster that no posterior may pass it over."""
    return _rate(posterior, rival.plan) > _rate(posterior, leader.plan) * (1 + _DRIFT)


def _has_drifted(posterior: Posterior) -> bool:
    """Return whether a confirmation ran at another speed than the plan's own search probe.

    The machine's speed has then changed meanwhile, and earlier measurements, the baseline's
    included, cannot be compared with later ones.
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
    """Return whether a confirmed plan is worse than the baseline, as far as they can be compared.

    If the baseline was not confirmed after it, all of the plan's measurements count.
    """
    comparable = baseline.role is Role.CONFIRMED
    rate = baseline.samples_per_second or 0.0
    return _is_worse(trial, baseline) and (comparable or _rate(posterior, trial.plan) < rate)


def _is_worse(trial: Trial, baseline: Trial) -> bool:
    """Return whether it measured slower, unless within error and with less memory."""
    slower = (trial.samples_per_second or 0.0) < (baseline.samples_per_second or 0.0)
    excused = trial.ties_with(baseline) and _held_bytes(trial) < _held_bytes(baseline)
    return trial.plan != baseline.plan and slower and not excused


def _by_speed(posterior: Posterior, trials: Sequence[Trial]) -> list[Trial]:
    """Return the last trial of each plan, the fastest first."""
    last = {trial.plan: trial for trial in trials}
    return sorted(last.values(), key=lambda t: -float(posterior.log_speed(t.plan).mean()))


def _expected_value(posterior: Posterior, trial: Trial) -> float:
    """Return the expected log speed, less the cost of the risk that the plan does not fit again."""
    cost = 0.0
    if trial.role is not Role.CONFIRMED:
        cost = float(oom_cost(posterior, np.array(posterior.oom_risk(trial.plan))))
    return float(posterior.log_speed(trial.plan).mean()) - cost


def _lead(posterior: Posterior, leader: Trial, other: Trial) -> float:
    """Return the expected difference of the log speeds."""
    return float((posterior.log_speed(leader.plan) - posterior.log_speed(other.plan)).mean())


def _may_win(posterior: Posterior, rival: Trial, leader: Trial) -> bool:
    """Return whether another measurement of the rival may change the answer."""
    is_leaner = _held_bytes(rival) <= _LESS_MEMORY * _held_bytes(leader)
    if is_leaner and _lead(posterior, leader, rival) <= TIE:
        return True
    faster = posterior.log_speed(rival.plan) > posterior.log_speed(leader.plan) + TIE
    return float(faster.mean()) > _MAY_WIN


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
    predicted = np.median(posterior.log_speeds(sizes), axis=0)
    best = float(predicted[fitting].max())
    ahead = float(np.median(posterior.log_speed(leader.plan)))
    rates = (
        f"predicted to reach {format_rate(np.exp(best))} at most, and the leading plan "
        f"{format_rate(np.exp(ahead))}"
    )
    return rates if best <= ahead else f"not tried before the search stopped: {rates}"


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
