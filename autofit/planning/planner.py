"""The next plan to probe, or the reason to stop: pure functions of a posterior.

`decide` is asked while the search goes on, `confirm` (in `autofit.planning.confirmation`) when it
is over. A posterior follows from the specification and the trials alone, so the same trials give
the same answer in any process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autofit.measurement import Measurement, Outcome, Trial, oom_probes_of
from autofit.plan import Plan
from autofit.planning.curves import Array
from autofit.planning.feasibility import MicroBatches
from autofit.planning.posterior import MEMORY_ERROR, Posterior
from autofit.units import format_bytes

# Which plan is worth a probe most.
#
# Every variant has a ceiling in each world: the largest micro-batch that its line there leaves room
# for. What the variant would gain over the leading plan at its ceiling is its potential. A probe is
# worth what its own plan gains, and a share of the potential that it opens, wherever it fits;
# against that stands what running out of memory costs, wherever it does not. A plan that was run is
# worth running again as far as noise hides whether it beats the leader (the knowledge gradient of
# Frazier, Powell and Dayanik, SIAM J. Control Optim. 47, 2008).
#
# All worths are logarithms of speed: 0.01 is one percent.

Mask: TypeAlias = NDArray[np.bool_]

MIN_GAIN = 0.002
MIN_GAIN_WITH_PRIOR = 0.001
"""A probe that is worth less is not run; where none is worth more, the search ends.

With a prior on memory the ladder is short, and there are probes to spare for smaller gains."""

PATIENCE = 20
"""After so many probes the next must be worth more, with the square of their number."""

OPENED = 0.6
"""How much of a variant's potential a probe of it is credited with."""

OOM_COST = 0.055
OOM_COST_WITH_PRIOR = 0.3
"""What running out of memory costs the first time: a probe is lost, and a fresh worker may be
needed. See `oom_cost`."""

CEILING_MARGIN = 0.8 * MEMORY_ERROR
"""What a plan leaves free so that it seldom goes over: about 80 % of its probes then fit."""

STRIDE = 4
"""No micro-batch is tried that is more than so many times the largest measured."""

_RISKS = (0.006, 0.015, 0.03, 0.06, 0.12, 0.25, 0.4, 0.6)
_MOST_WITHOUT_FIT = 12
_SMALLEST_STRIDE = 1.02  # a micro-batch must be so many times the variant's largest to be news


@dataclass(frozen=True)
class Proposal:
    """A plan, and what a probe of it is worth."""

    plan: Plan
    worth: float


def leading(posterior: Posterior) -> Trial | None:
    """Return the trial whose plan, among those that ran and fit, is expected to be fastest."""
    return max(
        posterior.fitting, key=lambda t: float(posterior.log_speed(t.plan).mean()), default=None
    )


def propose(posterior: Posterior, allowed: Mask) -> Plan | None:
    """The plan of an allowed variant that is most worth a probe; None where none is."""
    leader = leading(posterior)
    if leader is None:
        return _likeliest_to_fit(posterior, allowed)
    found = [*_new_plans(posterior, leader, allowed), *_repeats(posterior, leader, allowed)]
    best = max(found, key=lambda proposal: proposal.worth, default=None)
    worth = MIN_GAIN_WITH_PRIOR if posterior.has_prior_memory else MIN_GAIN
    least = worth * max(1.0, len(posterior.probes) / PATIENCE) ** 2
    return best.plan if best is not None and best.worth > least else None


def oom_cost(posterior: Posterior, risk: Array) -> Array:
    """What such a risk of running out of memory costs after these probes.

    It grows with every time that it happened. With a prior on memory, risks are near the truth,
    and the cost is in proportion. Elsewhere small risks are the least certain (on simulated devices
    those below 1 % came true in 3 % of the probes, those above 20 % in a quarter of what was said),
    so it goes with the root.
    """
    happened = oom_probes_of(posterior.probes)
    if posterior.has_prior_memory:
        return OOM_COST_WITH_PRIOR * (1 + happened / 2) * risk
    cost: Array = OOM_COST * (1 + happened) * np.sqrt(risk)
    return cost


def ceilings(posterior: Posterior) -> MicroBatches:
    """(worlds, variants): the largest micro-batch with room to spare; 0 where there is none."""
    budget = posterior.spec.vram_budget_bytes * math.exp(-CEILING_MARGIN)
    return posterior.sizes.down(np.minimum(posterior.memory.x_at(budget), posterior.bound))


def _new_plans(posterior: Posterior, leader: Trial, allowed: Mask) -> list[Proposal]:
    """Per risk of running out of memory, the best plan at just that risk."""
    ahead = posterior.log_speed(leader.plan)[:, None]
    potential = np.maximum(posterior.log_speeds(ceilings(posterior)) - ahead, 0).mean(axis=0)
    proposals = []
    for sizes in _steps(posterior):
        fits = posterior.memory_limit >= sizes
        gain = (np.maximum(posterior.log_speeds(sizes) - ahead, 0) * fits).mean(axis=0)
        opened = OPENED * np.maximum(potential - gain, 0)
        chance = fits.mean(axis=0)
        worth = gain + chance * opened - oom_cost(posterior, 1 - chance)
        worth = np.where(allowed & (sizes >= 1), worth, -np.inf)
        best = int(np.argmax(worth))
        if worth[best] > -np.inf:
            plan = posterior.spec.space.plan(int(sizes[best]), posterior.variants[best])
            proposals.append(Proposal(plan, float(worth[best])))
    return proposals


def _steps(posterior: Posterior) -> list[MicroBatches]:
    """Per risk, the next micro-batch of every variant; 0 where that would tell nothing new."""
    ran = [trial.plan for trial in posterior.probes if trial.measurement.step_times_s]
    largest = np.zeros(len(posterior.variants))
    for plan in ran:
        index = posterior.index(plan)
        if plan.micro_batch <= posterior.bound[index]:
            largest[index] = max(largest[index], plan.micro_batch)
    bound = np.minimum(posterior.bound, STRIDE * max(plan.micro_batch for plan in ran))
    steps = []
    for room in np.quantile(posterior.memory_limit, _RISKS, axis=0):
        wanted = np.maximum(np.minimum(room, bound), posterior.sizes.smallest)
        sizes = posterior.sizes.handy(wanted)
        news = (sizes > _SMALLEST_STRIDE * largest) & (sizes <= posterior.bound)
        steps.append(np.where(news, sizes, 0))
    return steps


def _repeats(posterior: Posterior, leader: Trial, allowed: Mask) -> list[Proposal]:
    """Plans that noise may hide the worth of."""
    rivals = {
        trial.plan: trial
        for trial in posterior.fitting
        if trial.plan != leader.plan and allowed[posterior.index(trial.plan)]
    }
    proposals = []
    for plan, trial in rivals.items():
        ahead = posterior.log_speed(plan) - posterior.log_speed(leader.plan)
        cost = oom_cost(posterior, np.array(posterior.oom_risk(plan)))
        proposals.append(Proposal(plan, _knowledge(ahead, posterior.noise(trial)) - float(cost)))
    return proposals


def _knowledge(ahead: Array, noise: float) -> float:
    """What is gained on average when one more noisy look may change who leads."""
    mean, deviation = float(ahead.mean()), float(ahead.std())
    told = deviation**2 / math.hypot(deviation, noise)
    if told == 0:
        return 0.0
    z = mean / told
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return told * (density + z * (1 + math.erf(z / math.sqrt(2))) / 2)


def _likeliest_to_fit(posterior: Posterior, allowed: Mask) -> Plan | None:
    """While nothing fits: the smallest plan not run yet that most likely does."""
    if len(posterior.probes) >= _MOST_WITHOUT_FIT:
        return None
    smallest = posterior.sizes.smallest
    chance = (posterior.memory_limit >= smallest).mean(axis=0)
    open_ones: Sequence[int] = np.flatnonzero(allowed & (smallest <= posterior.bound)).tolist()
    best = max(open_ones, key=lambda index: (float(chance[index]), -index), default=None)
    if best is None:
        return None
    return posterior.spec.space.plan(int(smallest[best]), posterior.variants[best])


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


def decide(posterior: Posterior) -> Decision:
    """The plan to probe next, or the reason why none can be expected to win."""
    space = posterior.spec.space
    if not posterior.probes:
        return Decision(space.baseline)
    costly = np.array([space.is_costly(settings) for settings in posterior.variants])
    plan = propose(posterior, posterior.usable & ~costly)
    if plan is None and costly.any():
        plan = propose(posterior, posterior.usable & costly & _beside_leaders(posterior))
    if plan is not None:
        return Decision(plan)
    fits = any(trial.ok for trial in posterior.probes)
    why = (
        "no plan left is expected to gain enough to be worth a probe"
        if fits
        else "not one plan that was tried fits"
    )
    return Decision(None, stopped_because=why)


def veto(posterior: Posterior, plan: Plan) -> Measurement | None:
    """What stands for a proposal that must not run; None where it may.

    For a plan that was measured before, what was measured stands in the trial. One that is set
    aside, refused at this size, or whose upper bound is over the budget, stands there as not run.
    The sampler is told PRUNED of either.
    """
    before = next((trial for trial in posterior.probes if trial.plan == plan), None)
    if before is not None:
        return before.measurement
    why = posterior.exclusions.why(plan.settings)
    if why is not None:
        return Measurement(Outcome.UNSUPPORTED, detail=f"not run: {why}")
    variant = posterior.index(plan)
    if plan.micro_batch > posterior.bound[variant]:
        return Measurement(Outcome.OVER_BUDGET, detail="not run: a smaller one did not fit")
    if (posterior.memory_limit[:, variant] < plan.micro_batch).mean() <= VETO_RISK:
        return None
    bound = float(np.quantile(posterior.held_bytes(plan), 1 - VETO_RISK))
    allowed = format_bytes(posterior.spec.vram_budget_bytes)
    return Measurement(
        Outcome.OVER_BUDGET,
        detail=f"not run: may hold up to {format_bytes(bound)} where {allowed} are allowed",
    )


def forecast(posterior: Posterior, plan: Plan) -> Forecast:
    """What a plan is expected to need."""
    peak = (
        round(float(np.median(posterior.held_bytes(plan))))
        if posterior.can_predict_memory
        else None
    )
    timed = [t.measurement for t in posterior.probes if t.measurement.step_times_s]
    lengths = [m.seconds - sum(m.step_times_s) for m in timed if m.seconds is not None]
    if not lengths:
        return Forecast(peak, None)
    step_time_s = plan.samples_per_step / float(np.exp(np.median(posterior.log_speed(plan))))
    return Forecast(peak, max(lengths) + max(5.0, 10 * step_time_s))


def _beside_leaders(posterior: Posterior) -> Mask:
    """Variants that differ from one of the fastest in nothing but costly values."""
    space = posterior.spec.space
    cheap = [t for t in posterior.probes if t.ok and not space.is_costly(t.plan.settings)]
    cheap.sort(key=lambda trial: -float(posterior.log_speed(trial.plan).mean()))
    leaders = list(dict.fromkeys(trial.plan.variant for trial in cheap))[:_LEADERS]
    costly = {name for name, dimension in space.dimensions.items() if dimension.trial_cost_s > 0}
    rests = [{pair for pair in variant if pair[0] not in costly} for variant in leaders]
    return np.array([any(rest <= set(v.items()) for rest in rests) for v in posterior.variants])
