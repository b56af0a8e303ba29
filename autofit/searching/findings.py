"""What a search finds beside its answer: the largest evaluation, the loader, bounds of a step.

Each is looked at after the final comparison, and none is worth an answer: what fails or hangs is
told in words, and what the time did not suffice for is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from autofit.devices.base import host_memory
from autofit.errors import InvalidArgument, SearchTimedOut, release_exception
from autofit.measurement import Trial
from autofit.plan import Plan
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import Prober
from autofit.probing.requests import OnStage
from autofit.registry import resolve
from autofit.report.record import Record
from autofit.training.loader import Loader, own_settings

if TYPE_CHECKING:
    from autofit.probing.session import Session

# Of the timeout, kept back for measuring a loader.
SHARE_FOR_LOADER = 0.15
# What is measured, beside the number that the user has now.
WORKERS = (0, 1, 2, 4, 8)
# From this share of the plan's speed on, the loader keeps up.
KEEPS_UP = 0.95
_CLOSE = 0.97  # of the fastest: as good, and the fewest workers win
_PREFETCH = 2  # torch's own
_SHARE_OF_HOST = 0.5  # for what workers load in advance: a full /dev/shm ends them by a bus error


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


# Does the user's loader keep up with the best plan: what it delivers, by its number of workers.


def measure_loader(
    prober: Prober,
    loader: Loader,
    plan: Plan,
    consumed: float,
    on_stage: Callable[[str], None],
    facts: dict[str, Any],
) -> None:
    """Measure a workload's loader; what was measured is kept if that ends early.

    Of an `IterableDataset` each worker has a copy, and whether the copies share its samples out
    cannot be seen: the number of workers stays the user's.

    Args:
        prober: of the workload.
        loader: as the user gave it.
        plan: that is to be fed.
        consumed: its samples/s by itself.
        on_stage: called with the name of each measurement that begins.
        facts: filled with what is found, as the report keeps it.

    Raises:
        SearchTimedOut, WorkerFailed: the search's time was over; or the loader hung or ended
            the worker.
        Exception: what the user's code raised.
    """
    from autofit.probing.loader import deliver

    own = own_settings(loader, plan.samples_per_step)
    rates: dict[int, float] = {}
    facts |= {
        "own_workers": own.num_workers,
        "consumed_samples_per_second": consumed,
        "delivered": [],
        "num_workers": None,
        "bottleneck": None,
        "keeps_workers": False,
        "warnings": [],
    }
    batch_bytes = 0
    for workers in dict.fromkeys((own.num_workers, *WORKERS)):
        if workers * _PREFETCH * batch_bytes > _SHARE_OF_HOST * _free_bytes():
            continue
        on_stage(f"measuring the loader with {workers} workers")
        settings = replace(own, num_workers=workers, prefetch_factor=_PREFETCH if workers else None)
        found = prober.run(partial(deliver, settings=settings, plan=plan))
        rates[workers] = found.samples_per_second
        facts["delivered"] = [
            {"num_workers": count, "samples_per_second": rates[count]} for count in sorted(rates)
        ]
        facts |= {"keeps_workers": found.is_stream, "warnings": list(found.warnings)}
        batch_bytes = found.batch_bytes
        if found.is_stream:
            break
    facts["num_workers"], facts["bottleneck"] = verdict(rates, consumed)


def verdict(rates: Mapping[int, float], consumed: float) -> tuple[int, str]:
    """Return the fewest workers that are as good as any, and what bounds the speed with them.

    Without workers, loading and training take turns; with workers they overlap.

    Args:
        rates: number of workers -> samples/s that the loader delivers.
        consumed: samples/s that the plan takes by itself.
    """
    speeds = {
        workers: min(consumed, rate) if workers else 1 / (1 / consumed + 1 / rate)
        for workers, rate in rates.items()
    }
    good = [workers for workers, speed in speeds.items() if speed >= _CLOSE * max(speeds.values())]
    fewest = min(good)
    return fewest, "device" if speeds[fewest] >= KEEPS_UP * consumed else "loader"


def _free_bytes() -> int:
    """Return what is free of the host's memory, and of what workers hand batches on through."""
    free = host_memory()[1]
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return free
    return min(free, shared.f_bavail * shared.f_frsize)
