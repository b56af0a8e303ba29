"""The next plan to probe, or the reason to stop: pure functions of what is believed.

In this order:

1. The baseline. While nothing fits, the smallest plan that most likely does.
2. The incumbent again, once, where nothing tells noise from odd step times; then the plans of an
   expert (`autofit.planning.experts`).
3. The plan of the largest acquisition value (`autofit.planning.candidates`), while that is enough:
   the more probes there were, the more a further one has to promise.
4. The incumbent without its recomputation, where that is expected to fit by now; and half its size,
   where a drop of speed would not have shown.
5. Costly values, beside the fastest plans without.

`decide` serves the search itself; `next_turn` in `autofit.planning.confirmation` serves its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.planning.beliefs import Beliefs
from autofit.planning.candidates import (
    best_candidate,
    best_costly,
    half_of_incumbent,
    likeliest_to_fit,
    without_recomputation,
)
from autofit.planning.constants import (
    CAUTIOUS,
    DOUBTED,
    DOUBTED_PROBES,
    FORECAST_STEPS,
    NOISY,
    TIMED_S,
)
from autofit.planning.experts import expert_plan
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


@dataclass(frozen=True)
class Proposal:
    """A plan to probe, and what is expected of it.

    Attributes:
        plan: the plan.
        forecast: of its probe.
        veto: the measurement to record in place of a probe; None: it may run. Only what another
            sampler proposed has one.
    """

    plan: Plan
    forecast: Forecast
    veto: Measurement | None = None

    @classmethod
    def of(cls, beliefs: Beliefs, plan: Plan) -> Proposal:
        """Return the proposal of a plan that is to run whatever is expected of it."""
        return cls(plan, forecast(beliefs, plan))

    @classmethod
    def of_stranger(cls, beliefs: Beliefs, plan: Plan) -> Proposal:
        """Return the proposal of a plan that another sampler chose, with its veto if any."""
        return cls(plan, forecast(beliefs, plan), veto(beliefs, plan))


def decide(
    beliefs: Beliefs, *, may_repeat: bool = True, seconds_left: float | None = None
) -> Proposal | NothingLeft:
    """Return the plan to probe next with its forecast, or why none can be expected to win.

    Args:
        beliefs: after the search so far. Pending plans are not proposed again.
        may_repeat: whether the incumbent may be, which tells noise from odd step times. Not where
            another sampler proposes the plans: it would never be run.
        seconds_left: costly values are tried only where that is expected to suffice; None: always.
    """
    if not beliefs.probes:
        return Proposal.of(beliefs, beliefs.spec.space.baseline)
    is_costly = beliefs.known.trial_costs_s > 0
    cheap, costly = beliefs.usable & ~is_costly, beliefs.usable & is_costly
    incumbent = beliefs.incumbent
    if incumbent is None:
        plan = likeliest_to_fit(beliefs, cheap) or likeliest_to_fit(beliefs, costly)
        return (
            Proposal.of(beliefs, plan) if plan else NothingLeft("not one plan that was tried fits")
        )
    plan = (
        (_doubted(beliefs) if may_repeat else None)
        or expert_plan(beliefs, cheap)
        or best_candidate(beliefs, cheap)
        or without_recomputation(beliefs, cheap)
        or half_of_incumbent(beliefs)
        or (best_costly(beliefs, costly, seconds_left) if costly.any() else None)
    )
    if plan is not None:
        return Proposal.of(beliefs, plan)
    why = "no plan left is expected to gain enough to be worth a probe"
    noise = beliefs.errors.of(incumbent)
    if noise > NOISY:  # which hides gains
        why += f", where measurements scatter by {noise:.0%}"
    return NothingLeft(why)


def _doubted(beliefs: Beliefs) -> Plan | None:
    """Return the incumbent, to repeat it, where nothing yet tells noise from odd step times."""
    incumbent = beliefs.incumbent
    if incumbent is None or beliefs.errors.repeated or len(beliefs.fitting) < DOUBTED_PROBES:
        return None
    if any(trial.plan == incumbent.plan for trial in beliefs.pending):
        return None
    is_odd = beliefs.time.spread > DOUBTED * beliefs.typical_noise
    return incumbent.plan if is_odd else None


def veto(beliefs: Beliefs, plan: Plan) -> Measurement | None:
    """Return the measurement to record for a proposal that must not run; None if it may.

    A plan that was run before keeps the measurement of that time. One that is excluded, refused at
    this size, or whose upper bound is over the budget, is recorded as not run.
    """
    before = next((trial for trial in beliefs.probes if trial.plan == plan), None)
    if before is not None:
        return before.measurement
    why = beliefs.exclusions.why(plan.settings)
    if why is not None:
        return Measurement(Outcome.UNSUPPORTED, detail=f"not run: {why}")
    if plan.micro_batch > beliefs.bound_at(beliefs.index(plan), plan.micro_batch):
        return Measurement(Outcome.OVER_BUDGET, detail="not run: a smaller one did not fit")
    if beliefs.oom_risk(plan) <= CAUTIOUS:
        return None
    bound = format_bytes(beliefs.held.quantile(plan, 1 - CAUTIOUS))
    allowed = format_bytes(beliefs.spec.vram_budget_bytes)
    return Measurement(
        Outcome.OVER_BUDGET, detail=f"not run: may hold up to {bound} where {allowed} are allowed"
    )


def forecast(beliefs: Beliefs, plan: Plan) -> Forecast:
    """Return the expected cost of a probe of the plan."""
    peak = round(beliefs.held.quantile(plan)) if beliefs.can_predict_memory else None
    timed = [t.measurement for t in beliefs.probes if t.measurement.step_times_s]
    overheads = [_overhead_s(m, m.seconds) for m in timed if m.seconds is not None]
    if not overheads:
        return Forecast(peak, None)
    step_time_s = plan.samples_per_step / math.exp(beliefs.mean_log_speed(plan))
    timed_s = max(TIMED_S, FORECAST_STEPS * step_time_s)
    cost_s = float(beliefs.trial_costs_s[beliefs.index(plan)])
    return Forecast(peak, max(overheads) + timed_s + cost_s)


def _overhead_s(measurement: Measurement, seconds: float) -> float:
    """Return the seconds of a probe beside its timed steps and what it compiled."""
    compiled = measurement.start_is_warm is not None
    start_up_s = measurement.start_up_s if compiled else None
    return seconds - sum(measurement.step_times_s) - (start_up_s or 0.0)


def believing(beliefs: Beliefs, running: Sequence[tuple[Plan, TrialKind]]) -> Beliefs:
    """Return the beliefs if those plans turn out as forecast; unchanged if there are none.

    Args:
        beliefs: of what was measured.
        running: the plans, and why each runs.
    """
    if not running:
        return beliefs
    first = 1 + max((trial.number for trial in beliefs.measured), default=-1)
    pending = [
        Trial(number, kind, plan, _forecast(beliefs, plan))
        for number, (plan, kind) in enumerate(running, start=first)
    ]
    return Beliefs(beliefs.spec, beliefs.measured, pending, beliefs.known)


def _forecast(beliefs: Beliefs, plan: Plan) -> Measurement:
    """Return what a probe is expected to measure, with the noise and duration of the incumbent's.

    It is expected to fit, or the plan would not be running; but to fail like all others while
    nothing has fitted, so that the next worker tries another variant.
    """
    incumbent = beliefs.incumbent
    if incumbent is None:
        return Measurement(Outcome.OOM, detail="pending")
    measured = incumbent.measurement
    costs_s = beliefs.trial_costs_s
    cost_s = float(costs_s[beliefs.index(plan)] - costs_s[beliefs.index(incumbent.plan)])
    step_time_s = plan.samples_per_step / math.exp(beliefs.mean_log_speed(plan))
    factor = step_time_s / (measured.step_time_s or step_time_s)
    held = beliefs.spec.vram_budget_bytes
    if beliefs.can_predict_memory:
        held = min(held, round(beliefs.held.quantile(plan)))
    return Measurement(
        Outcome.OK,
        detail="pending",
        step_times_s=[factor * seconds for seconds in measured.step_times_s],
        peak_reserved_bytes=held,
        non_torch_bytes=0,
        allocator_retries=0,
        seconds=measured.seconds and measured.seconds + cost_s,
    )
