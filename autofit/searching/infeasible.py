"""The errors of a search without an answer: the workload fails, or nothing fits the budget."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.errors import AutofitError, SearchTimedOut, WorkloadFailed
from autofit.measurement import Outcome, Trial, TrialKind, probes_of
from autofit.plan import NoFeasiblePlan, Plan
from autofit.planning.beliefs import Beliefs
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import Prober
from autofit.probing.requests import ProbeRequest
from autofit.registry import resolve
from autofit.units import format_bytes, round_up_shown


def workload_failure(trial: Trial) -> AutofitError | None:
    """Return the error of a plain workload that cannot be trained, or None if it can."""
    outcome, detail = trial.measurement.outcome, trial.measurement.detail
    if trial.kind is not TrialKind.BASELINE:
        return None
    if outcome is Outcome.NONFINITE:
        return WorkloadFailed(
            f"the loss of the baseline is not finite ({detail or trial.plan}): check the "
            "sample batch, the loss and the learning rate before looking for a faster plan"
        )
    if outcome is Outcome.LEAK:
        return WorkloadFailed(
            f"the baseline leaks memory in every step ({detail or trial.plan}), so no plan fits "
            "for long: look for a loss or an output that is kept with its graph"
        )
    return None


def nothing_fits(beliefs: Beliefs, trials: Sequence[Trial]) -> AutofitError:
    """Return the error of a search none of whose plans, run in these trials, can be returned."""
    spec, tried = beliefs.spec, beliefs.probes
    about_memory = [trial for trial in tried if trial.measurement.outcome.about_memory]
    if not about_memory:
        last = probes_of(trials)[-1]
        return WorkloadFailed(
            f"no plan could be run; the last one, {last.plan}, ended with "
            f"{last.measurement.outcome.value}: {last.measurement.detail or 'no detail'}"
        )

    def expected(trial: Trial) -> float:
        return beliefs.held.quantile(trial.plan)

    nearest = min(about_memory, key=lambda trial: (expected(trial), trial.plan.micro_batch))
    if nearest.measurement.is_of_evaluation:
        return none_fits(spec, nearest.plan, None, None, in_evaluation=True)
    held = nearest.measurement.held_bytes
    if held is not None and held > spec.vram_budget_bytes:
        return none_fits(spec, nearest.plan, held, held)
    if not beliefs.can_predict_memory:
        return none_fits(spec, nearest.plan, None, None)
    needed = max(expected(nearest), spec.vram_budget_bytes + 1)
    return none_fits(spec, nearest.plan, round(needed), _sufficient(beliefs), is_expected=True)


def none_fits(
    spec: SearchSpec,
    nearest: Plan,
    required_bytes: int | None,
    sufficient_bytes: int | None,
    *,
    is_expected: bool = False,
    in_evaluation: bool = False,
) -> NoFeasiblePlan:
    """Return the error; its attributes say what the arguments are.

    Args:
        spec: of the search.
        nearest, required_bytes, sufficient_bytes: as for `NoFeasiblePlan`.
        is_expected: whether the bytes were not measured.
        in_evaluation: whether the training ran, and its evaluation had no room.
    """
    allowed = spec.vram_budget_bytes
    if required_bytes is None:
        needs = "ran out of memory" + " in its evaluation" * in_evaluation
    else:
        needs = (
            f"{'is expected to need' if is_expected else 'needs'} {format_bytes(required_bytes)}"
            f"{' in its evaluation' if in_evaluation else ''}"
        )
    budget = None if sufficient_bytes is None else round_up_shown(sufficient_bytes)
    enough = f"; a budget of {format_bytes(budget)} is expected to work" if budget else ""
    named = nearest.without(spec.space.default_settings)
    return NoFeasiblePlan(
        f"nothing fits: the plan that needs least, {named}, {needs}, and the budget is "
        f"{format_bytes(allowed)}{enough}; {_ways_out(spec, in_evaluation=in_evaluation)}",
        plan=nearest,
        required_bytes=required_bytes,
        allowed_bytes=allowed,
        sufficient_bytes=budget,
    )


def _sufficient(beliefs: Beliefs) -> int | None:
    """Return the bytes that the leanest plan stays under with a probability of 75%."""
    space, smallest = beliefs.spec.space, beliefs.sizes.smallest
    needs = [
        beliefs.held.quantile(space.plan(int(smallest[at]), settings), 0.75)
        for at, settings in enumerate(beliefs.variants)
        if beliefs.usable[at]
    ]
    return round(max(min(needs), beliefs.spec.vram_budget_bytes + 1)) if needs else None


def with_measured_need(error: NoFeasiblePlan, prober: Prober, spec: SearchSpec) -> NoFeasiblePlan:
    """Return the error with what the nearest plan needs on a CPU: measured beyond the budget.

    The budget of a CPU bounds an account of tensors and not the process (see
    `autofit.devices.cpu`), so a plan that exceeds it can be run; up to half of the host's memory.
    """
    if error.plan is None:
        return error
    environment = prober.survey().environment
    if environment.device != "cpu":
        return error
    request = ProbeRequest(
        resolve(error.plan, spec.space, prober.strategies),
        vram_budget_bytes=environment.total_bytes // 2,
        steps=1,
    )
    try:
        measurement = prober.probe(request).measurement
    except SearchTimedOut:
        return error
    if not measurement.ok or measurement.held_bytes is None:
        return error
    held = measurement.needed_bytes
    in_evaluation = held != measurement.held_bytes
    return none_fits(spec, error.plan, held, held, in_evaluation=in_evaluation)


def _ways_out(spec: SearchSpec, *, in_evaluation: bool) -> str:
    if in_evaluation:
        return "raise the VRAM budget, or evaluate fewer samples at once (eval_batch=)"
    ways = "raise the VRAM budget, shorten the samples or make the model smaller"
    fixed = spec.space.only_micro_batch
    if fixed is None or fixed == 1:
        return ways
    return (
        f"no other micro-batch than {fixed} was tried, since split and whole gradients differ or "
        "could not be compared: allow_accumulation_change=True tries smaller ones, and so does "
        f"Workload(loss_weight=) where it makes the two equal; else {ways}"
    )
