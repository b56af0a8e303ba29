"""What to run next, and why no more: pure functions of what is believed after some trials.

`decide` is asked while the search goes on, `confirm` (in `autofit.searching.confirming`) when it is
over. Beliefs are worked out from facts and trials alone, so the same trials always give the same
answer, in whatever process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan
from autofit.searching.beliefs import Beliefs
from autofit.searching.proposals import Mask, propose
from autofit.units import format_bytes

VETO_RISK = 0.1
"""A foreign proposal that is more likely than this to run out of memory is not run."""

_LEADERS = 2  # costly values are tried on so many of the fastest other variants


@dataclass(frozen=True)
class Decision:
    """The next plan, or the end.

    Attributes:
        plan: what to run next; None: stop.
        stopped_because: why nothing more is run; None where there is a plan.
    """

    plan: Plan | None
    stopped_because: str | None = None


@dataclass(frozen=True)
class Forecast:
    """What is expected of a plan; None: unknown.

    Attributes:
        peak_bytes: what it will hold.
        seconds: what its probe will take.
    """

    peak_bytes: int | None
    seconds: float | None


def decide(beliefs: Beliefs) -> Decision:
    """The plan to probe next, or the reason why none can be expected to win."""
    space = beliefs.facts.space
    if not beliefs.probes:
        return Decision(space.baseline)
    costly = np.array([space.is_costly(settings) for settings in beliefs.variants])
    plan = propose(beliefs, beliefs.usable & ~costly)
    if plan is None and costly.any():
        plan = propose(beliefs, beliefs.usable & costly & _beside_leaders(beliefs))
    if plan is not None:
        return Decision(plan)
    fits = any(trial.ok for trial in beliefs.probes)
    why = (
        "no plan left is expected to gain enough to be worth a probe"
        if fits
        else "not one plan that was tried fits"
    )
    return Decision(None, stopped_because=why)


def veto(beliefs: Beliefs, plan: Plan) -> Measurement | None:
    """What stands for a proposal that must not run; None where it may.

    For a plan that was measured before, what was measured stands in the trial. One that is set
    aside, refused at this size, or whose upper bound is over the budget, stands there as not run.
    The sampler is told PRUNED of either.
    """
    before = next((trial for trial in beliefs.probes if trial.plan == plan), None)
    if before is not None:
        return before.measurement
    why = beliefs.exclusions.why(plan.settings)
    if why is not None:
        return Measurement(Outcome.UNSUPPORTED, detail=f"not run: {why}")
    variant = beliefs.index(plan)
    if plan.micro_batch > beliefs.bound[variant]:
        return Measurement(Outcome.OVER_BUDGET, detail="not run: a smaller one did not fit")
    if (beliefs.room[:, variant] < plan.micro_batch).mean() <= VETO_RISK:
        return None
    bound = float(np.quantile(beliefs.held(plan), 1 - VETO_RISK))
    allowed = format_bytes(beliefs.facts.vram_budget_bytes)
    return Measurement(
        Outcome.OVER_BUDGET,
        detail=f"not run: may hold up to {format_bytes(bound)} where {allowed} are allowed",
    )


def forecast(beliefs: Beliefs, plan: Plan) -> Forecast:
    """What a plan is expected to need."""
    peak = round(float(np.median(beliefs.held(plan)))) if beliefs.knows_memory else None
    timed = [t.measurement for t in beliefs.probes if t.measurement.step_times_s]
    lengths = [m.seconds - sum(m.step_times_s) for m in timed if m.seconds is not None]
    if not lengths:
        return Forecast(peak, None)
    step_time_s = plan.samples_per_step / float(np.exp(np.median(beliefs.speed(plan))))
    return Forecast(peak, max(lengths) + max(5.0, 10 * step_time_s))


def _beside_leaders(beliefs: Beliefs) -> Mask:
    """Variants that differ from one of the fastest in nothing but costly values."""
    space = beliefs.facts.space
    cheap = [t for t in beliefs.probes if t.ok and not space.is_costly(t.plan.settings)]
    cheap.sort(key=lambda trial: -float(beliefs.speed(trial.plan).mean()))
    leaders = list(dict.fromkeys(trial.plan.variant for trial in cheap))[:_LEADERS]
    costly = {name for name, dimension in space.dimensions.items() if dimension.trial_cost_s > 0}
    rests = [{pair for pair in variant if pair[0] not in costly} for variant in leaders]
    return np.array([any(rest <= set(v.items()) for rest in rests) for v in beliefs.variants])
