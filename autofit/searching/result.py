"""What a search found, and why it ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from autofit.errors import AutofitError, NoFeasiblePlan, WorkloadFailed
from autofit.measurement import Outcome, Role, Trial, oom_probes_of, probes_of
from autofit.plan import ResolvedPlan
from autofit.planning.confirmation import left_out
from autofit.planning.posterior import Posterior
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import Prober
from autofit.probing.survey import Survey
from autofit.registry import resolve
from autofit.report.record import Record, SearchSummary, Skipped
from autofit.searching.predicted_lines import learned
from autofit.strategy import Strategy
from autofit.training.workload import Workload
from autofit.units import format_bytes

INTERRUPTED = "interrupted"
"""Why a search stopped that Ctrl-C ended."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        spec: what it searched.
        trials: every trial of the study, in order.
        best: the plan to train with; confirmed, unless the search was cut short before that (its
            role says so). It was run, and it fits.
        baseline: the first trial.
        skipped: variants that were left out, and why.
        stopped_because: why no further plan was searched.
    """

    spec: SearchSpec
    trials: tuple[Trial, ...]
    best: Trial
    baseline: Trial
    skipped: tuple[Skipped, ...]
    stopped_because: str

    @property
    def probes(self) -> int:
        """Plans that were run, baseline and confirmations counted."""
        return len(probes_of(self.trials))

    @property
    def oom_probes(self) -> int:
        """Probes that ran out of memory."""
        return oom_probes_of(self.trials)


# A plan as the lines that a user would write to train with it.


def paste_lines(resolved: ResolvedPlan) -> list[str]:
    """Return the lines for batch geometry, then those of each strategy."""
    plan = resolved.plan
    lines = [f"micro_batch = {plan.micro_batch}  # samples in one forward and backward"]
    if plan.accumulation_steps > 1:
        lines.append(
            f"accumulation_steps = {plan.accumulation_steps}  # micro-batches in one "
            f"optimizer step of {plan.samples_per_step} samples; "
            "weight each loss by its share of the samples"
        )
    for strategy, settings, payloads in resolved.by_strategy():
        lines += strategy.describe(settings, payloads)
    return lines


# The errors that a search ends with: the user's own, and that nothing can be returned.


def hopeless(trial: Trial) -> AutofitError | None:
    """Return what is wrong with the plain workload itself, after its trial; None: nothing."""
    outcome, detail = trial.measurement.outcome, trial.measurement.detail
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


def nothing_fits(spec: SearchSpec, trials: Sequence[Trial]) -> AutofitError:
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
    required, allowed = smallest.measurement.held_bytes, spec.vram_budget_bytes
    if required is None:
        needed = "ran out of memory"
    elif required <= allowed:  # its peak before it asked for what there was not
        needed = f"held {format_bytes(required)} and asked for more"
    else:
        needed = f"needed {format_bytes(required)}"
    return NoFeasiblePlan(
        f"nothing fits: the smallest plan tried ({smallest.plan}) {needed} where "
        f"{format_bytes(allowed)} were allowed; {_ways_out(spec)}",
        plan=smallest.plan,
        required_bytes=required,
        allowed_bytes=allowed,
    )


def _ways_out(spec: SearchSpec) -> str:
    ways = "raise the VRAM budget, shorten the samples or make the model smaller"
    fixed = spec.space.only_micro_batch
    if fixed is None or fixed == 1:
        return ways
    return (
        f"no other micro-batch than {fixed} was tried, since split and whole gradients differ or "
        "could not be compared: allow_resplit=True tries smaller ones, and so does loss_weight= "
        f"where it makes the two equal; else {ways}"
    )


# What a search leaves behind: survey and result as the record that a report is a view of.

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
    space = result.spec.space
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
        vram_budget_bytes=result.spec.vram_budget_bytes,
        search=SearchSummary(
            probes=result.probes,
            oom_probes=result.oom_probes,
            seconds=seconds,
            stopped_because=result.stopped_because,
            seed=result.spec.seed,
        ),
        dimensions=space.dimensions,
        trials=result.trials,
        best_number=result.best.number,
        baseline_number=result.baseline.number,
        skipped=result.skipped,
        paste={
            trial.number: paste_lines(resolve(trial.plan, space, strategies))
            for trial in result.trials
        },
        notes=(*survey.notes, *_not_split(result.best)),
        difference=difference,
        calibration=learned(survey, result.baseline),
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


def difference_of(prober: Prober, result: SearchResult) -> Mapping[str, Any] | None:
    """How far the best plan's loss and gradients are from the baseline's; None where not told."""
    best, baseline, spec = result.best.plan, result.baseline.plan, result.spec
    if best == baseline or not result.baseline.ok or result.stopped_because == INTERRUPTED:
        return None
    samples = min(best.samples_per_step, baseline.samples_per_step)
    try:
        first, second = (resolve(p, spec.space, prober.strategies) for p in (baseline, best))
        compared = prober.compare(first, second, samples, spec.vram_budget_bytes).to_dict()
    except (Exception, KeyboardInterrupt):  # train_step, full memory, impatience: do without
        return None
    finite = math.isfinite(compared["loss"]) and math.isfinite(compared["gradient"])
    return compared if finite else None


def skips(posterior: Posterior) -> tuple[Skipped, ...]:
    """Return the settings that the search left out, each with the reason."""
    return tuple(Skipped(settings, why) for settings, why in left_out(posterior))
