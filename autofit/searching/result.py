"""The result of a search, its record for the report, and the errors that end a search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from autofit.errors import AutofitError, NoFeasiblePlan, SearchTimedOut, WorkloadFailed
from autofit.measurement import ACT, NOT_TRIED, Outcome, Trial, TrialKind, oom_probes_of, probes_of
from autofit.plan import Plan, ResolvedPlan
from autofit.planning.beliefs import Beliefs
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import Prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.survey import Survey
from autofit.registry import resolve
from autofit.report.paste import paste_lines
from autofit.report.record import FUNCTIONS, Record, SearchSummary, Skipped, Undecided
from autofit.strategy import Strategy
from autofit.training.batch import describe
from autofit.training.lengths import Lengths
from autofit.training.loss import LossSource
from autofit.training.workload import Workload
from autofit.units import format_bytes, format_seconds, round_up_shown

if TYPE_CHECKING:
    from autofit.probing.session import Session

# `stopped_because` of a search that Ctrl-C ended.
INTERRUPTED = "interrupted"

_COSTLY_TO_WATCH = "its memory is not recorded: the plan is costly to run again"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        spec: the specification of the search.
        trials: every trial of the study, in order.
        best: a trial of the plan that measured fastest, or that won a tie. It ran and fits; its
            kind is confirmation, unless the search was cut short before that.
        recommended: a trial of the plan to train with: the best, or the baseline where that was not
            told from it.
        baseline: the first trial.
        skipped: settings that were left out, with the reasons.
        stopped_because: why no further plan was searched.
        comparison_ended: whether the final comparison came to its own end.
        undecided_because: why the best plan was not told from the baseline; None: it was.
        with_more_time: the plan that a longer timeout would have tried next; None: there was time
            enough, or something else ended the search.
        may_probe: whether the prober may be used any more: not after Ctrl-C, nor where the machine
            became ill or no worker could be started.
        notes: for the reader, on what was left out after the search.
    """

    spec: SearchSpec
    trials: tuple[Trial, ...]
    best: Trial
    recommended: Trial
    baseline: Trial
    skipped: tuple[Skipped, ...]
    stopped_because: str
    comparison_ended: bool = True
    undecided_because: Undecided | None = None
    with_more_time: Plan | None = None
    may_probe: bool = True
    notes: Sequence[str] = ()

    @property
    def is_decided(self) -> bool:
        """Whether the best plan was told from the baseline."""
        return self.undecided_because is None

    def key_of(self, trial: Trial) -> str:
        """Return what a report calls the trial's plan, of the best and the baseline."""
        return "best" if trial.plan == self.best.plan else "baseline"

    @property
    def probes(self) -> int:
        """Number of plans that were run, baseline and confirmations included."""
        return len(probes_of(self.trials))

    @property
    def oom_probes(self) -> int:
        """Number of probes that ran out of memory."""
        return oom_probes_of(self.trials)


def record_of(
    survey: Survey,
    result: SearchResult,
    strategies: tuple[Strategy, ...],
    workload: Workload,
    difference: Mapping[str, Any] | None,
    memory: Mapping[str, Any],
    session_seconds: Sequence[float],
) -> Record:
    """Return the record that a report shows.

    Args:
        survey: of the workload, with the notes of prediction.
        result: of the search.
        strategies: that the search was given.
        workload: that was searched.
        difference: see `difference_of`.
        memory: see `memory_of`.
        session_seconds: duration of each session of the search, the start of the worker included.
    """
    space = result.spec.space
    non_torch_bytes = result.baseline.measurement.non_torch_bytes
    return Record(
        version=version("torch-autofit"),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        environment={
            **asdict(survey.environment),
            **({"world_size": survey.world_size} if survey.world_size > 1 else {}),
        },
        workload=_workload_facts(workload, survey),
        vram_budget_bytes=result.spec.vram_budget_bytes,
        search=_summary_of(result, survey, session_seconds),
        dimensions=space.dimensions,
        trials=result.trials,
        best_number=result.best.number,
        baseline_number=result.baseline.number,
        skipped=result.skipped,
        paste={
            trial.number: paste_lines(
                resolve(trial.plan, space, strategies),
                has_loss_weight=workload.loss_weight is not None,
            )
            for trial in result.trials
        },
        notes=(
            *survey.notes,
            *_notes_on(survey, result),
            *_of_lengths(workload, result.recommended),
        ),
        difference=difference,
        memory=memory,
        # What the baseline's probe on a GPU teaches later predictions
        calibration=(
            {}
            if survey.environment.gpu is None or non_torch_bytes is None
            else {"non_torch_bytes": non_torch_bytes}
        ),
        recommended_number=result.recommended.number,
    )


def _workload_facts(workload: Workload, survey: Survey) -> dict[str, Any]:
    model = workload.model
    return {
        "model": str(getattr(model, "__name__", type(model).__name__)),
        "fingerprint": survey.fingerprint,
        "parameters": survey.parameters,
        "parameter_bytes": survey.parameter_bytes,
        "global_batch": survey.global_batch,
        "sample_batch_size": survey.sample_batch_size,
        "may_change_accumulation": survey.may_change_accumulation,
        "allow_accumulation_change": survey.allow_accumulation_change,
        "loss": survey.loss,
        "lacks_loss": survey.loss == LossSource.STAND_IN,
        "given": [name for name in FUNCTIONS if getattr(workload, name) is not None],
        "clip_grad_norm": workload.clip_grad_norm,
        "sample_shapes": dict(survey.sample_shapes),
        "samples": survey.samples.value,
        "described_size": survey.described_size,
        **({"batched": survey.batched} if survey.batched is not None else {}),
        **({"tokens": asdict(survey.tokens)} if survey.tokens else {}),
    }


def _summary_of(
    result: SearchResult, survey: Survey, session_seconds: Sequence[float]
) -> SearchSummary:
    return SearchSummary(
        probes=result.probes,
        oom_probes=result.oom_probes,
        seconds=sum(session_seconds),
        sessions=len(session_seconds),
        stopped_because=result.stopped_because,
        seed=result.spec.seed,
        effort=result.spec.effort.value,
        comparison_ended=result.comparison_ended,
        undecided_because=result.undecided_because,
        busy=survey.busy,
        planned_samples=result.spec.planned_samples,
    )


def _notes_on(survey: Survey, result: SearchResult) -> Iterator[str]:
    """Yield what a reader should know of the answer, the machine, and the time."""
    plan, run = result.recommended.plan, result.recommended.measurement.micro_batches_run
    if plan.accumulation_steps > 1 and run == 1:
        yield (
            f"{ACT}training_step never called training.micro_batches: unless it splits the batch "
            f"itself, all {plan.samples_per_step} samples of a step ran at once"
        )
    yield from result.notes
    if survey.busy is not None:
        yield f"The machine was busy ({survey.busy}): small differences in speed are uncertain"
    if survey.environment.device == "cpu":
        yield (
            "On a CPU the VRAM budget limits the tensors, counted as a GPU's allocator would hold "
            "them, not the memory of the process"
        )
    yield from result.recommended.measurement.notes
    if result.with_more_time is not None:
        left = result.with_more_time.without(result.spec.space.default_settings)
        yield f"{NOT_TRIED}{left}, because time ran out"


def _of_lengths(workload: Workload, best: Trial) -> Iterator[str]:
    """Yield notes on the lengths of samples: their mix, and the price of a new one."""
    given = workload.sample_batch
    if isinstance(given, Lengths):
        mix = workload.mix(workload.described_size)
        shares = [f"{share:.0%} {next(iter(describe(b).values()))}" for share, b in mix]
        yield f"The speed is that of steps of {len(shares)} lengths: {', '.join(shares)}"
    if new_shape_s := best.measurement.new_shape_s:
        seconds = format_seconds(max(new_shape_s))
        yield f"The first step of another length took up to {seconds} more than later ones"


def difference_of(prober: Prober, result: SearchResult) -> Mapping[str, Any] | None:
    """Return how far the best plan's loss and gradients are from the baseline's; None: unknown."""
    best, baseline, spec = result.best.plan, result.baseline.plan, result.spec
    if best == baseline or not (result.baseline.ok and result.may_probe):
        return None
    samples = min(best.samples_per_step, baseline.samples_per_step)
    try:
        first, second = (resolve(p, spec.space, prober.strategies) for p in (baseline, best))
        compared = prober.compare(first, second, samples, spec.vram_budget_bytes).to_dict()
    # A note is not worth failing a search that has its answer.
    except (Exception, SystemExit):
        return None
    finite = math.isfinite(compared["loss"]) and math.isfinite(compared["gradient"])
    return compared if finite else None


def memory_of(prober: Prober, result: SearchResult) -> Mapping[str, Any]:
    """Return where the memory of the recommended plan goes; {}: nobody could look.

    One that is costly to run again is not looked at, and the baseline is instead.
    """
    if not result.may_probe:
        return {}
    space, looked_at, left_out = result.spec.space, result.recommended, {}
    if space.is_costly(looked_at.plan.settings):
        left_out = {"best": {"why_not": _COSTLY_TO_WATCH}}
        looked_at = result.baseline
    key = result.key_of(looked_at)
    plans = {key: resolve(looked_at.plan, space, prober.strategies)}
    seconds = {key: looked_at.measurement.step_time_s or 0.0}
    try:
        found = prober.run(partial(memory_use_of, plans=plans, step_seconds=seconds))
        return {**found, **left_out}
    # A picture is not worth failing a search that has its answer.
    except (Exception, SystemExit):
        return {}


def memory_use_of(
    session: Session, plans: Mapping[str, ResolvedPlan], step_seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Look in the process that holds the model; only that one imports prediction."""
    from autofit.prediction.memory_use import memory_uses

    return memory_uses(session, plans, step_seconds)


def workload_failure(trial: Trial) -> AutofitError | None:
    """Return the error of a plain workload that cannot be trained; None: it can."""
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
    """Return the bytes that the leanest plan stays under with a probability of 75 %."""
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
        f"loss_weight= where it makes the two equal; else {ways}"
    )
