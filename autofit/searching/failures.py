"""The errors that a search ends with: the user's own, and that nothing can be returned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autofit.errors import AutofitError, NoFeasiblePlan, WorkloadFailed
from autofit.measurement import Outcome, Role, Trial
from autofit.probing.prober import Prober, users_error
from autofit.searching.facts import SearchFacts
from autofit.searching.tally import probes_of
from autofit.units import format_bytes


def hopeless(trial: Trial, prober: Prober) -> BaseException | None:
    """What is wrong with the plain workload itself, after its trial; None where nothing is."""
    outcome, detail = trial.measurement.outcome, trial.measurement.detail
    if (error := users_error(prober, trial.measurement)) is not None:
        return error
    if trial.role is not Role.BASELINE:
        return None
    if outcome is Outcome.NONFINITE:
        return WorkloadFailed(
            f"the loss of the plain workload is not finite ({detail or trial.plan}): check the "
            "sample batch, the loss and the learning rate before looking for a faster plan"
        )
    if outcome is Outcome.LEAK:
        return WorkloadFailed(
            f"the plain workload holds more memory after every step ({detail or trial.plan}): "
            "no plan can fit for long; look for a loss or an output that is kept with its graph"
        )
    return None


def _size(trial: Trial) -> tuple[int, float]:
    """What the smallest plan is told by: micro-batch, then the bytes held, where they are known."""
    held = trial.measurement.held_bytes
    return trial.plan.micro_batch, math.inf if held is None else held


def nothing_fits(facts: SearchFacts, trials: Sequence[Trial]) -> AutofitError:
    """What to say when not one plan that was tried can be returned."""
    tried = probes_of(trials)
    about_memory = [trial for trial in tried if trial.measurement.outcome.about_memory]
    if not about_memory:
        last = tried[-1]
        return WorkloadFailed(
            f"not one plan could be run; the last, {last.plan}, ended "
            f"{last.measurement.outcome.value}: {last.measurement.detail or 'no detail'}"
        )
    smallest = min(about_memory, key=_size)
    required, allowed = smallest.measurement.held_bytes, facts.vram_budget_bytes
    if required is None:
        needed = "ran out of memory"
    elif required <= allowed:  # its peak before it asked for what there was not
        needed = f"held {format_bytes(required)} and asked for more"
    else:
        needed = f"needed {format_bytes(required)}"
    return NoFeasiblePlan(
        f"nothing fits: the smallest plan tried ({smallest.plan}) {needed} where "
        f"{format_bytes(allowed)} were allowed; {_ways_out(facts)}",
        plan=smallest.plan,
        required_bytes=required,
        allowed_bytes=allowed,
    )


def _ways_out(facts: SearchFacts) -> str:
    ways = "raise the VRAM budget, shorten the samples or make the model smaller"
    fixed = facts.space.only_micro_batch
    if fixed is None or fixed == 1:
        return ways
    return (
        f"no other micro-batch than {fixed} was tried, since split and whole gradients differ or "
        "could not be compared: allow_resplit=True tries smaller ones, and so does loss_weight= "
        f"where it makes the two equal; else {ways}"
    )
