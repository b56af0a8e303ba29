"""The next plan to probe, or the reason to stop: pure functions of a posterior.

`decide` serves the search itself; `next_turn` in `autofit.planning.confirmation` serves its end. A
posterior follows from the specification and the trials alone, so the same trials give the same
answer in any process. The plan most worth a probe comes next (`autofit.planning.proposals`); values
that take long to try come last, beside the leading plans alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.planning.constants import (
    COSTLY_LEADERS,
    FORECAST_STEPS,
    MIN_WORTH,
    NOISE_WORTH,
    NOISY,
    PATIENCE,
    PATIENCE_WITH_LINES,
    SURPRISE,
    SURPRISE_PROBES,
    TIMED_S,
    VETO_RISK,
)
from autofit.planning.least_squares import Array
from autofit.planning.posterior import Mask, Posterior
from autofit.planning.proposals import likeliest_to_fit, new_plans, within_gap
from autofit.units import format_bytes


@dataclass(frozen=True)
class NothingLeft:
    """No plan is worth another probe; `because` says why."""

    because: str


@dataclass(frozen=True)
class Forecast:
    """The expected cost of a probe; None: unknown.

    Attributes:
        peak_bytes: the bytes that it will hold.
        seconds: how long it will take.
    """

    peak_bytes: int | None
    seconds: float | None


def decide(
    posterior: Posterior, *, may_repeat: bool = True, seconds_left: float | None = None
) -> Plan | NothingLeft:
    """Return the plan to probe next, or the reason why none can be expected to win.

    Args:
        posterior: of the search so far. Plans in flight that it believes are not proposed again.
        may_repeat: whether the leader may be, which tells noise from odd step times. Not where
            another sampler proposes the plans: it would never be run.
        seconds_left: costly values are tried only where that is expected to suffice; None: always.
    """
    space = posterior.spec.space
    if not posterior.probes:
        return space.baseline
    doubted = _surprise(posterior) if may_repeat else None
    if doubted is not None:
        return doubted
    costs_s = posterior.columns.trial_costs_s
    costly = costs_s > 0
    plan = propose(posterior, posterior.usable & ~costly)
    if plan is None and costly.any():
        ran = [t.measurement for t in posterior.fitting if not space.is_costly(t.plan.settings)]
        usual = [m.seconds for m in ran if m.seconds is not None]
        seconds = costs_s + (float(np.mean(usual)) if usual else 0.0)
        beside = posterior.usable & costly
        if leaders := posterior.cheap_leaders(COSTLY_LEADERS):
            beside &= posterior.beside(leaders)
        if seconds_left is not None:
            beside &= seconds <= seconds_left
        plan = propose(posterior, beside, seconds=seconds)
    if plan is not None:
        return plan
    if not any(trial.ok for trial in posterior.probes):
        return NothingLeft("not one plan that was tried fits")
    why, leader = "no plan left is expected to gain enough to be worth a probe", posterior.leader
    noise = 0.0 if leader is None else posterior.errors.of(leader)
    if noise > NOISY:  # which bounds the gains that are looked for
        why += f", where measurements scatter by {noise:.0%}"
    return NothingLeft(why)


def veto(posterior: Posterior, plan: Plan) -> Measurement | None:
    """Return the measurement to record for a proposal that must not run; None if it may.

    A plan that was run before keeps the measurement of that time. One that is excluded, refused at
    this size, or whose upper bound is over the budget, is recorded as not run.
    """
    before = next((trial for trial in posterior.probes if trial.plan == plan), None)
    if before is not None:
        return before.measurement
    posterior = posterior.about([plan])
    why = posterior.exclusions.why(plan.settings)
    if why is not None:
        return Measurement(Outcome.UNSUPPORTED, detail=f"not run: {why}")
    if plan.micro_batch > posterior.bound[posterior.index(plan)]:
        return Measurement(Outcome.OVER_BUDGET, detail="not run: a smaller one did not fit")
    if posterior.oom_risk(plan) <= VETO_RISK:
        return None
    bound = float(np.quantile(posterior.held_bytes(plan), 1 - VETO_RISK))
    allowed = format_bytes(posterior.spec.vram_budget_bytes)
    return Measurement(
        Outcome.OVER_BUDGET,
        detail=f"not run: may hold up to {format_bytes(bound)} where {allowed} are allowed",
    )


def forecast(posterior: Posterior, plan: Plan) -> Forecast:
    """Return the expected cost of a probe of the plan."""
    posterior = posterior.about([plan])
    held = posterior.held_bytes(plan) if posterior.can_predict_memory else None
    peak = None if held is None else round(float(np.median(held)))
    timed = [t.measurement for t in posterior.probes if t.measurement.step_times_s]
    overheads = [m.seconds - sum(m.step_times_s) for m in timed if m.seconds is not None]
    if not overheads:
        return Forecast(peak, None)
    step_time_s = plan.samples_per_step / float(np.exp(np.median(posterior.log_speed(plan))))
    return Forecast(peak, max(overheads) + max(TIMED_S, FORECAST_STEPS * step_time_s))


def propose(posterior: Posterior, allowed: Mask, *, seconds: Array | None = None) -> Plan | None:
    """Return the plan of an allowed variant that is most worth a probe; None if none is.

    Args:
        posterior: of the search so far.
        allowed: (variants), which may be proposed.
        seconds: (variants), that a probe takes, where they differ so much that the gain per second
            decides. Then no probe is proposed that takes longer than what it is expected to save
            over the training, where the length of that is known.
    """
    leader = posterior.leader
    if leader is None:
        return likeliest_to_fit(posterior, allowed)
    space, in_flight = posterior.spec.space, {trial.plan for trial in posterior.in_flight}
    variants, sizes, worths = new_plans(posterior, leader, allowed)
    rates = worths
    if seconds is not None:  # none for probes that may not pay within the training
        took_s, samples = seconds[variants], posterior.spec.planned_samples
        training_s = math.inf
        if samples is not None:
            training_s = samples / math.exp(posterior.mean_log_speed(leader.plan))
        pays = (worths > 0) & (worths > took_s / training_s)
        rates = np.where(pays, worths / took_s, -np.inf)
    worth, plan = -math.inf, None
    for row in np.argsort(-rates, kind="stable"):
        proposed = space.plan(int(sizes[row]), posterior.variants[variants[row]])
        if proposed not in in_flight and rates[row] > -math.inf:
            worth, plan = float(worths[row]), proposed
            break
    least = _least_worth(posterior, leader)
    if worth <= least and seconds is None and allowed[posterior.index(leader.plan)]:
        gap = within_gap(posterior, leader)
        worth, plan = gap if gap is not None and gap[1] not in in_flight else (worth, plan)
    return plan if worth > least else None


def _least_worth(posterior: Posterior, leader: Trial) -> float:
    patience = PATIENCE_WITH_LINES if posterior.has_predicted_memory else PATIENCE
    factor = posterior.spec.effort.least_worth_factor
    # A quick search looks for large gains alone, and noise does not make those small.
    least = max(factor * MIN_WORTH, min(factor, 1.0) * NOISE_WORTH * posterior.errors.of(leader))
    return least * max(1.0, len(posterior.probes) / patience) ** 2


def _surprise(posterior: Posterior) -> Plan | None:
    """Return the leading plan, to repeat it, where nothing yet tells noise from odd step times."""
    leader = posterior.leader
    if leader is None or posterior.errors.repeated or len(posterior.fitting) < SURPRISE_PROBES:
        return None
    if any(trial.plan == leader.plan for trial in posterior.in_flight):
        return None
    return leader.plan if posterior.spread > SURPRISE * posterior.typical_noise else None


def believing(posterior: Posterior, running: Sequence[tuple[Plan, TrialKind]]) -> Posterior:
    """Return the posterior that also believes those plans; the same one where there are none.

    Args:
        posterior: of what was measured.
        running: the plans, and why each runs.
    """
    known = [each for each in running if each[0].variant in posterior.given.index]
    if not known:
        return posterior
    posterior = posterior.about([plan for plan, _ in known])
    first = 1 + max((trial.number for trial in posterior.measured), default=-1)
    believed = [
        Trial(number, kind, plan, _forecast(posterior, plan))
        for number, (plan, kind) in enumerate(known, start=first)
    ]
    return Posterior(posterior.spec, posterior.measured, believed, posterior.given)


def _forecast(posterior: Posterior, plan: Plan) -> Measurement:
    """Return what a probe is expected to measure, with the noise and duration of the leader's.

    It is expected to fit, or the plan would not be running; but to fail like all others while
    nothing has fitted, so that the next worker tries another variant.
    """
    leader = posterior.leader
    if leader is None:
        return Measurement(Outcome.OOM, detail="in flight")
    measured = leader.measurement
    step_time_s = plan.samples_per_step / math.exp(posterior.mean_log_speed(plan))
    factor = step_time_s / (measured.step_time_s or step_time_s)
    held = posterior.spec.vram_budget_bytes
    if posterior.can_predict_memory:
        held = min(held, round(float(np.median(posterior.held_bytes(plan)))))
    return Measurement(
        Outcome.OK,
        detail="in flight",
        step_times_s=[factor * seconds for seconds in measured.step_times_s],
        peak_reserved_bytes=held,
        non_torch_bytes=0,
        allocator_retries=0,
        seconds=measured.seconds,
    )
