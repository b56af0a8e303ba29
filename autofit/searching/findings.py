"""What a search adds to its record: facts, notes and code, and what it finds beside its answer.

That is where memory goes, the largest evaluation, whether the loader keeps up, and what bounds a
step. Each is looked at after the final comparison, and none may cost the answer: what fails or
hangs is told in words, and what the time did not suffice for is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidArgument, SearchTimedOut, release_exception
from autofit.measurement import ACT, NOT_TRIED, Trial
from autofit.plan import ResolvedPlan
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import Prober
from autofit.probing.requests import OnStage
from autofit.probing.survey import Survey
from autofit.registry import resolve
from autofit.report.paste import lines_of_trials
from autofit.report.record import FUNCTIONS, Record
from autofit.strategy import Strategy
from autofit.training.batch import describe
from autofit.training.lengths import Lengths
from autofit.training.loss import LossSource
from autofit.training.samples import SamplesKind
from autofit.training.workload import Workload
from autofit.units import format_seconds

if TYPE_CHECKING:
    from autofit.probing.session import Session
    from autofit.training.loader import Loader

# Of the timeout, kept back for measuring a loader.
SHARE_FOR_LOADER = 0.15
_COSTLY_TO_WATCH = "its memory is not recorded: the plan is costly to run again"


def described(
    record: Record,
    spec: SearchSpec,
    survey: Survey,
    strategies: tuple[Strategy, ...],
    workload: Workload,
    largest: Mapping[str, str] | None = None,
) -> Record:
    """Return the record that a report shows.

    Args:
        record: as the search ended.
        spec: of the search.
        survey: of the workload, with the notes of prediction.
        strategies: that the search was given.
        workload: that was searched.
        largest: see `largest_micro_batch`.
    """
    environment = asdict(survey.environment)
    if survey.ranks > 1:
        environment["ranks"] = survey.ranks
    non_torch_bytes = record.baseline.measurement.non_torch_bytes
    teaches = survey.environment.gpu is not None and non_torch_bytes is not None
    has_loss_weight = workload.loss_weight is not None
    return replace(
        record,
        environment=environment,
        workload=_workload_facts(workload, survey, largest),
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


def _workload_facts(
    workload: Workload, survey: Survey, largest: Mapping[str, str] | None
) -> dict[str, Any]:
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
        "optimizer": workload.optimizer_name,
        "assumes_optimizer": workload.assumes_optimizer,
        "given": [name for name in FUNCTIONS if getattr(workload, name) is not None],
        "clip_grad_norm": workload.clip_grad_norm,
        "sample_shapes": dict(survey.sample_shapes),
        "samples": survey.samples.value,
        "described_size": survey.described_size,
        **({} if largest is None else {"micro_batch_shapes": dict(largest)}),
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


def largest_micro_batch(prober: Prober, survey: Survey, record: Record) -> Mapping[str, str] | None:
    """Describe the largest micro-batch of the recommended plan that the given samples make.

    None: the rows of the sample batch tell, or nobody could look.
    """
    if not record.may_probe or (survey.chose_size and survey.samples is SamplesKind.ROWS):
        return None
    try:
        size = record.recommended.plan.micro_batch
        return prober.run(partial(_largest_batch, samples=size))
    except (Exception, SystemExit):  # as of `memory_of`
        return None


def _largest_batch(session: Session, samples: int) -> Mapping[str, str] | None:
    """Look at a copy of the workload: its functions may hold generators of random numbers."""
    return session.builder.fresh_workload().largest_batch(samples)


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


def look_for_findings(
    prober: Prober,
    spec: SearchSpec,
    record: Record,
    *,
    loader: Loader | None,
    trace: str | None,
    on_stage: OnStage,
    facts: dict[str, Any],
) -> None:
    """Find what there is beside the answer; what was not looked at is missing.

    Args:
        prober: of the search.
        spec: of the search.
        record: of its report, without findings.
        loader: the workload's.
        trace: file for a trace of the best plan; None: none.
        on_stage: called with the name of each stage that begins.
        facts: filled with the findings as JSON data, by name.
    """
    chosen = record.recommended
    if chosen.measurement.evaluation_peak_bytes is not None:
        from autofit.probing.evaluation import largest_evaluation

        budget = spec.vram_budget_bytes
        resolved = resolve(chosen.plan, spec.space, prober.strategies)
        with _failure("evaluation", facts) as found:
            on_stage("looking for the largest evaluation batch")
            look = partial(largest_evaluation, resolved=resolved, vram_budget_bytes=budget)
            found |= asdict(prober.run(look, budget))
    if loader is not None:
        from autofit.searching.loader_settings import measure_loader  # most have none

        with _failure("loader", facts) as found:
            consumed = record.speed_of(chosen) or 0.0
            measure_loader(prober, loader, chosen.plan, consumed, on_stage, found)
    with _failure("bounds", facts) as found:
        on_stage("measuring what bounds a step")
        found[record.key_of(chosen)] = _shares(prober, spec, record, chosen, trace, facts)
        if trace is not None:
            found["trace"] = trace


def _shares(
    prober: Prober,
    spec: SearchSpec,
    record: Record,
    trial: Trial,
    trace: str | None,
    facts: dict[str, Any],
) -> Mapping[str, float] | None:
    """Return the share of a step that each of its bounds takes; None: unknown.

    The FLOPs of the baseline become a fact, and those of the trial's plan where it did not run.
    """
    baseline = record.baseline_beside_best
    counted = baseline if baseline.ok else trial
    one, other = (resolve(t.plan, spec.space, prober.strategies) for t in (trial, counted))
    is_costly = spec.space.is_costly(counted.plan.settings)
    look = partial(
        _look_at_step,
        step_time_s=trial.measurement.step_time_s,
        plan=one,
        trace=trace,
        counted=None if is_costly else other,
    )
    shares, flops = prober.run(look, spec.vram_budget_bytes)
    if flops is not None:
        facts["flops"] = {"per_sample": flops, "peak_per_second": _peak_flops_per_s(record)}
    return shares


def _look_at_step(
    session: Session, step_time_s: float | None, **given: Any
) -> tuple[Mapping[str, float] | None, float | None]:
    """Look in the process that holds the model, which alone imports what looks."""
    from autofit.probing.profile import look_at_step

    profiled, flops = look_at_step(session, **given)
    if profiled is None or step_time_s is None:
        return None, flops
    return profiled.shares(step_time_s), flops


def _peak_flops_per_s(record: Record) -> float | None:
    name = record.environment.get("gpu")
    if name is not None:
        from autofit.devices.gpu_catalogue import find_gpu

        with suppress(InvalidArgument):  # of a GPU that the table does not have
            return find_gpu(name).peak_flops_per_s
    return None


@contextmanager
def _failure(name: str, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the facts of that name; what fails inside is told in them as "failed"."""
    found = facts[name] = {}
    try:
        yield found
    except SearchTimedOut:
        found["failed"] = "the time of the search was over"
    except (Exception, SystemExit) as error:
        found["failed"] = f"{type(error).__name__}: {error}".strip()
        release_exception(error)  # in this process its frames hold a loader's processes
