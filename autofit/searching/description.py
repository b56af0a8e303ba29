"""The record of a search for its report, and what is looked at of its answer for that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from autofit.measurement import ACT, NOT_TRIED, Trial
from autofit.plan import ResolvedPlan
from autofit.probing.prober import Prober
from autofit.probing.survey import Survey
from autofit.registry import resolve
from autofit.report.paste import lines_of_trials
from autofit.report.record import FUNCTIONS, Record, SearchSummary
from autofit.searching.result import SearchResult
from autofit.strategy import Strategy
from autofit.training.batch import describe
from autofit.training.lengths import Lengths
from autofit.training.loss import LossSource
from autofit.training.workload import Workload
from autofit.units import format_seconds

if TYPE_CHECKING:
    from autofit.probing.session import Session

_COSTLY_TO_WATCH = "its memory is not recorded: the plan is costly to run again"


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
        paste=lines_of_trials(
            result.trials, space, strategies, has_loss_weight=workload.loss_weight is not None
        ),
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
