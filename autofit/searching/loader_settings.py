"""Does the user's loader keep up with the best plan: what it delivers, by its number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from autofit.devices.base import host_memory
from autofit.plan import Plan
from autofit.probing.loader import deliver
from autofit.probing.prober import Prober
from autofit.training.loader import Loader, own_settings

# What is measured, beside the number that the user has now.
WORKERS = (0, 1, 2, 4, 8)
# From this share of the plan's speed on, the loader keeps up.
KEEPS_UP = 0.95
_CLOSE = 0.97  # of the fastest: as good, and the fewest workers win
_PREFETCH = 2  # torch's own
_SHARE_OF_HOST = 0.5  # for what workers load in advance: a full /dev/shm ends them by a bus error


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
    """Return the free host memory, and the free shared memory that workers send batches through."""
    free = host_memory()[1]
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return free
    return min(free, shared.f_bavail * shared.f_frsize)
