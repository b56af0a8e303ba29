"""What a search finds beside its answer: the largest evaluation, the loader, bounds of a step.

Each is looked at after the final comparison, and none is worth an answer: what fails or hangs is
told in words, and what the time did not suffice for is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidArgument, SearchTimedOut, release_exception
from autofit.measurement import Trial
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import Prober
from autofit.probing.requests import OnStage
from autofit.registry import resolve
from autofit.report.record import Record

if TYPE_CHECKING:
    from autofit.probing.session import Session
    from autofit.training.loader import Loader

# Of the timeout, kept back for measuring a loader.
SHARE_FOR_LOADER = 0.15


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
