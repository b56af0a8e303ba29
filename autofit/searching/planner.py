"""What to run next: a pure function of the facts of a search and its trials.

`decide` is asked while the search goes on, `confirm` when it is over. Neither keeps state, so the
same trials always give the same answer, in whatever process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Plan, Settings
from autofit.searching.facts import SearchFacts


@dataclass(frozen=True)
class Skip:
    """A variant that was not run, or not at its ceiling, and why."""

    settings: Settings
    why: str


@dataclass(frozen=True)
class Forecast:
    """What is expected of a plan; None: unknown.

    Attributes:
        peak_bytes: what it will hold.
        seconds: what the probe will take.
    """

    peak_bytes: int | None
    seconds: float | None


@dataclass(frozen=True)
class Decision:
    """The next plan, or the end.

    Attributes:
        plan: what to run next; None: stop.
        role: why it is run.
        predicted_peak_bytes: what it is expected to hold; None: unknown.
        stopped_because: why nothing more is run; None where there is a plan.
        skipped: what was left out so far, and why.
    """

    plan: Plan | None
    role: Role = Role.SEARCH
    predicted_peak_bytes: int | None = None
    stopped_because: str | None = None
    skipped: tuple[Skip, ...] = ()


def decide(facts: SearchFacts, trials: Sequence[Trial]) -> Decision:
    """The plan to probe next, or the reason why none can be expected to win."""
    if not trials:
        return Decision(facts.space.baseline, role=Role.BASELINE)
    settings = facts.space.plain_settings
    tried = {t.plan for t in trials}
    fits = [t for t in trials if t.ok]
    largest = max((t.plan.micro_batch for t in fits), default=0)
    too_large = min(
        (t.plan.micro_batch for t in trials if not t.ok),
        default=2 * facts.space.largest_micro_batch,
    )
    if not fits:
        plan = facts.space.plan(too_large // 2, settings)
    elif too_large <= 2 * largest:
        plan = facts.space.plan((largest + too_large) // 2, settings)
    else:
        plan = facts.space.plan(largest * 2, settings)
    if plan in tried or plan.micro_batch <= largest or plan.micro_batch >= too_large:
        return Decision(None, stopped_because="the largest micro-batch that fits is known")
    rates = [t.samples_per_second or 0.0 for t in fits]
    if len(rates) > 1 and rates[-1] < 1.02 * max(rates[:-1]):
        return Decision(None, stopped_because="a larger micro-batch brings less than 2 %")
    return Decision(plan)


def confirm(facts: SearchFacts, trials: Sequence[Trial]) -> Plan | None:
    """The leading plan to measure again next; None when the answer is confirmed."""
    confirmed = {t.plan for t in trials if t.role is Role.CONFIRMED}
    if any(t.ok for t in trials if t.role is Role.CONFIRMED):
        return None
    leading = sorted((t for t in trials if t.ok), key=lambda t: -(t.samples_per_second or 0.0))
    return next((t.plan for t in leading if t.plan not in confirmed), None)


def best_of(facts: SearchFacts, trials: Sequence[Trial]) -> Trial | None:
    """The trial to return: the fastest confirmed one, else the fastest that fits."""
    fits = [t for t in trials if t.ok]
    confirmed = [t for t in fits if t.role is Role.CONFIRMED]
    return max(confirmed or fits, key=lambda t: t.samples_per_second or 0.0, default=None)


def veto(facts: SearchFacts, trials: Sequence[Trial], plan: Plan) -> Measurement | None:
    """What stands for a proposal that must not run; None where it may.

    A plan that was measured before is answered from that trial; one whose upper bound is over the
    budget is answered with the bound.
    """
    for trial in trials:
        if trial.plan == plan and trial.role is not Role.VETOED:
            return trial.measurement
    return None


def forecast(facts: SearchFacts, trials: Sequence[Trial], plan: Plan) -> Forecast:
    """What a plan is expected to need."""
    return Forecast(None, None)


def probes_of(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that were run."""
    return [trial for trial in trials if trial.role is not Role.VETOED]


def oom_probes_of(trials: Sequence[Trial]) -> int:
    """How many probes ran out of memory."""
    return sum(trial.measurement.outcome is Outcome.OOM for trial in probes_of(trials))


def least_demanding(trial: Trial) -> tuple[int, int]:
    """Sorts the plan that asks for least memory first: by what it held, else by micro-batch."""
    return trial.plan.micro_batch, trial.measurement.held_bytes or 2**62
