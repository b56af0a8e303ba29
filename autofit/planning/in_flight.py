"""Plans that are running, believed to be what the posterior forecasts.

In: a posterior and the plans in flight. Out: a posterior that holds a trial of each of them, so
that no device is sent after what another is finding out. It is the "believer" of parallel Bayesian
optimization (Ginsbourger, Le Riche, Carraro, "Kriging is well-suited to parallelize optimization",
2010). Leaving these plans out alone made four workers slower than one.

A belief adds no confidence: larger strides are counted from what was measured
(`Posterior.measured`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.planning.posterior import Posterior


def believing(posterior: Posterior, running: Sequence[tuple[Plan, TrialKind]]) -> Posterior:
    """Return the posterior that also believes those plans; the same one where there are none.

    Args:
        posterior: of what was measured.
        running: the plans, and why each runs.
    """
    known = [each for each in running if each[0].variant in posterior.variant_keys]
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
        peak_allocated_bytes=held,
        peak_reserved_bytes=held,
        non_torch_bytes=0,
        allocator_retries=0,
        seconds=measured.seconds,
    )
