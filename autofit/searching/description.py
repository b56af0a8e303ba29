"""What a search adds to its record for the report, and what is looked at of its answer for that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from autofit.measurement import ACT, NOT_TRIED, Trial
from autofit.plan import ResolvedPlan
from autofit.probing.prober import Prober
from autofit.probing.survey import Survey
from autofit.registry import resolve
from autofit.report.paste import lines_of_trials
from autofit.report.record import FUNCTIONS, Record
from autofit.strategy import Strategy
from autofit.training.batch import describe
from autofit.training.lengths import Lengths
from autofit.training.loss import LossSource
from autofit.training.workload import Workload
from autofit.units import format_seconds

if TYPE_CHECKING:
    from autofit.planning.search_spec import SearchSpec
    from autofit.probing.session import Session

_COSTLY_TO_WATCH = "its memory is not recorded: the plan is costly to run again"


def described(
    record: Record,
    spec: SearchSpec,
    survey: Survey,
    strategies: tuple[Strategy, ...],
    workload: Workload,
) -> Record:
    """Return the record that a report shows.

    Args:
        record: as the search ended.
        spec: of the search.
        survey: of the workload, with the notes of prediction.
        strategies: that the search was given.
        workload: that was searched.
    """
    environment = asdict(survey.environment)
    if survey.world_size > 1:
        environment["world_size"] = survey.world_size
    non_torch_bytes = record.baseline.measurement.non_torch_bytes
    teaches = survey.environment.gpu is not None and non_torch_bytes is not None
    has_loss_weight = workload.loss_weight is not None
    return replace(
        record,
        environment=environment,
        workload=_workload_facts(workload, survey),
        search=replace(record.search, busy=survey.busy),
        paste=lines_of_trials(
            record.trials, spec.space, strategies, has_loss_weight=has_loss_weight
        ),
        notes=(
            *survey.notes,
            *_notes_on(survey, record),
            *_of_lengths(workload, record.recommended),
        ),
        # What the baseline's probe on a GPU teaches later predictions
        calibration={"non_torch_bytes": non_torch_bytes} if teaches else {},
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


def _notes_on(survey: Survey, record: Record) -> Iterator[str]:
    """Yield what a reader should know of the answer, the machine, and the time."""
    plan, run = record.recommended.plan, record.recommended.measurement.micro_batches_run
    if plan.accumulation_steps > 1 and run == 1:
        yield (
            f"{ACT}training_step never called training.micro_batches: unless it splits the batch "
            f"itself, all {plan.samples_per_step} samples of a step ran at once"
        )
    yield from record.notes
    if survey.busy is not None:
        yield f"The machine was busy ({survey.busy}): small differences in speed are uncertain"
    if survey.environment.device == "cpu":
        yield (
            "On a CPU the VRAM budget limits the tensors, counted as a GPU's allocator would hold "
            "them, not the memory of the process"
        )
    yield from record.recommended.measurement.notes
    if record.with_more_time is not None:
        left = record.with_more_time.without(record.default_settings)
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


def difference_of(prober: Prober, spec: SearchSpec, record: Record) -> Mapping[str, Any] | None:
    """Return how far the best plan's loss and gradients are from the baseline's; None: unknown."""
    best, baseline = record.best.plan, record.baseline.plan
    if best == baseline or not (record.baseline.ok and record.may_probe):
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


def memory_of(prober: Prober, spec: SearchSpec, record: Record) -> Mapping[str, Any]:
    """Return where the memory of the recommended plan goes; {}: nobody could look.

    One that is costly to run again is not looked at, and the baseline is instead.
    """
    if not record.may_probe:
        return {}
    looked_at, left_out = record.recommended, {}
    if spec.space.is_costly(looked_at.plan.settings):
        left_out = {"best": {"why_not": _COSTLY_TO_WATCH}}
        looked_at = record.baseline
    key = record.key_of(looked_at)
    plans = {key: resolve(looked_at.plan, spec.space, prober.strategies)}
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
