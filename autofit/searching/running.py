"""One plan of a search, run in a worker that suits it, and whose fault it is where it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Plan
from autofit.probing.prober import Prober, ProbeRequest
from autofit.searching.tally import fastest_of
from autofit.space import Space


def run_plan(
    plan: Plan,
    role: Role,
    *,
    prober: Prober,
    space: Space,
    trials: Sequence[Trial],
    expected_seconds: float | None,
) -> Measurement:
    """Run a plan as its role asks; an error that the plan itself brings about is `unsupported`.

    Args:
        plan: what to run.
        role: a confirmation is run in full, and has no rate to beat.
        prober: runs it.
        space: the search space that the plan is of.
        trials: what was run before.
        expected_seconds: what the probe is expected to take; None: unknown.
    """
    confirmed = role is Role.CONFIRMED
    leader = None if confirmed else fastest_of(trials)
    request = ProbeRequest(
        plan,
        payloads=space.payloads(plan.settings),
        incumbent_samples_per_second=leader.samples_per_second if leader else None,
        full_accumulation=confirmed,
        expected_seconds=expected_seconds,
    )
    alone = space.needs_fresh_worker(plan.settings)
    measurement = _probe_alone(prober, request) if alone else prober.probe(request)
    if measurement.outcome is Outcome.USER_ERROR and not _is_plain(plan, space, trials):
        return replace(measurement, outcome=Outcome.UNSUPPORTED)
    return measurement


def _probe_alone(prober: Prober, request: ProbeRequest) -> Measurement:
    """Probe in a worker that ran nothing before and runs nothing after."""
    prober.renew()
    measurement = prober.probe(request)
    prober.renew()
    return measurement


def _is_plain(plan: Plan, space: Space, trials: Sequence[Trial]) -> bool:
    """Whether what happens to this plan happens to the user's own training.

    Once the baseline has run, a larger micro-batch that raises is that plan's own affair.
    """
    baseline = space.baseline
    if any(trial.ok and trial.plan == baseline for trial in trials):
        return False
    return plan.variant == baseline.variant and plan.micro_batch >= baseline.micro_batch
