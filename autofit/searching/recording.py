"""What a search leaves behind: survey and result as the record that a report is a view of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from autofit.measurement import Trial
from autofit.probing.prober import WorkloadProber
from autofit.probing.survey import Survey
from autofit.report.paste import paste_lines
from autofit.report.record import Record, SearchSummary
from autofit.searching.foresight import learned
from autofit.searching.result import INTERRUPTED, SearchResult
from autofit.strategy import Strategy
from autofit.workload import Workload

_FUNCTIONS = ("loss_fn", "criterion", "loss_weight", "before_step", "train_step")
"""The user's functions, whose code no report holds: it says which there were."""


def record_of(
    survey: Survey,
    result: SearchResult,
    strategies: tuple[Strategy, ...],
    workload: Workload,
    difference: Mapping[str, Any] | None,
    seconds: float,
) -> Record:
    """What the report shows.

    Args:
        survey: of the workload, with what prediction had to note.
        result: of the search.
        strategies: those that the search was given.
        workload: what was searched.
        difference: see `difference_of`.
        seconds: what all of it took, the worker's start included.
    """
    space = result.facts.space
    return Record(
        version=version("torch-autofit"),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        environment=asdict(survey.environment),
        workload={
            "fingerprint": survey.fingerprint,
            "parameters": survey.parameters,
            "parameter_bytes": survey.parameter_bytes,
            "global_batch": survey.global_batch,
            "sample_batch_size": survey.sample_batch_size,
            "may_resplit": survey.may_resplit,
            "loss": survey.loss,
            "given": [name for name in _FUNCTIONS if getattr(workload, name) is not None],
            "clip_grad_norm": workload.clip_grad_norm,
            "sample_shapes": dict(survey.sample_shapes),
        },
        vram_budget_bytes=result.facts.vram_budget_bytes,
        search=SearchSummary(
            probes=result.probes,
            oom_probes=result.oom_probes,
            seconds=seconds,
            stopped_because=result.stopped_because,
            seed=result.facts.seed,
        ),
        dimensions=space.dimensions,
        trials=result.trials,
        best_number=result.best.number,
        baseline_number=result.baseline.number,
        skipped=result.skipped,
        paste={
            trial.number: paste_lines(trial.plan, strategies, space.payloads(trial.plan.settings))
            for trial in result.trials
        },
        notes=(*survey.notes, *_not_split(result.best)),
        difference=difference,
        calibration=learned(workload, survey, space, strategies, result.baseline),
    )


def _not_split(best: Trial) -> Iterator[str]:
    """A train_step is told how to split, and may do otherwise."""
    plan, run = best.plan, best.measurement.micro_batches_run
    if plan.accumulation_steps > 1 and run == 1:
        yield (
            f"train_step never called training.micro_batches: unless it splits the batch itself, "
            f"all {plan.samples_per_step} samples of a step ran at once, and not as "
            f"{plan.micro_batch} x {plan.accumulation_steps}"
        )


def difference_of(prober: WorkloadProber, result: SearchResult) -> Mapping[str, Any] | None:
    """How far the best plan's loss and gradients are from the baseline's; None where not told."""
    best, baseline = result.best.plan, result.baseline.plan
    if best == baseline or not result.baseline.ok or result.stopped_because == INTERRUPTED:
        return None
    payloads = [result.facts.space.payloads(plan.settings) for plan in (baseline, best)]
    samples = min(best.samples_per_step, baseline.samples_per_step)
    try:
        compared = prober.compare(baseline, best, payloads, samples).to_dict()
    except (Exception, KeyboardInterrupt):  # train_step, full memory, impatience: do without
        return None
    finite = math.isfinite(compared["loss"]) and math.isfinite(compared["gradient"])
    return compared if finite else None
