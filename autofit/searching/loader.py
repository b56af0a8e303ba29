"""The settings of a loader for a plan: measured alone, then feeding the plan.

Alone, the fewest worker processes are looked for that deliver what the plan consumes, as far as the
host's memory holds what they load in advance. Then the plan is trained on what the loader delivers,
with these workers and with the settings that the user has now; speed end to end decides.

Of an `IterableDataset` each worker has a copy, and whether the copies share the samples out cannot
be seen: there the number of workers stays the user's, since others might train on samples twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from autofit.devices.cpu import host_memory
from autofit.plan import ResolvedPlan
from autofit.probing.loader import Delivery, Feeding, deliver, feed
from autofit.probing.prober import Prober
from autofit.training.loader import Loader, LoaderSettings, own_settings, settings_taken

KEEPS_UP = 0.95
"""From this share of the plan's speed on, end to end, the loader keeps up."""
MARGIN = 0.9
"""Of what it delivers alone, a loader is relied on for this share while the plan is trained."""
CLOSE = 0.97
"""Settings that reach this share of the best speed are as good, and the fewest workers win."""
_GAIN = 1.1  # of twice the workers, for yet more to be tried
_WORKERS_PER_CORE = 4  # most of them may wait for disks and networks
_SHARE_OF_HOST = 0.8
_PREFETCH = 2  # torch's own
_MORE_PREFETCH = (4, 8)


@dataclass(frozen=True)
class Host:
    """What the host offers a loader.

    Attributes:
        cores: that this process may use.
        free_bytes: of its memory.
        shared_bytes: free in /dev/shm, through which workers hand batches on; None: unknown.
    """

    cores: int
    free_bytes: int
    shared_bytes: int | None

    @classmethod
    def here(cls) -> Host:
        """Return what this host offers now."""
        try:
            shared = os.statvfs("/dev/shm")
        except OSError:
            return cls(len(os.sched_getaffinity(0)), host_memory()[1], None)
        free = shared.f_bavail * shared.f_frsize
        return cls(len(os.sched_getaffinity(0)), host_memory()[1], free)

    def most_workers(self, deliveries: Sequence[Delivery]) -> int:
        """Return how many workers have room, by what was measured of a loader, and sense."""
        ahead = max(1, _PREFETCH * deliveries[0].batch_bytes)
        each = max((d.worker_bytes or 0) // (d.settings.num_workers or 1) for d in deliveries)
        room = [self.free_bytes / (ahead + each)]
        if self.shared_bytes is not None:
            room.append(self.shared_bytes / ahead)
        return min(int(_SHARE_OF_HOST * min(room)), _WORKERS_PER_CORE * self.cores)


def expected_speed(delivery: Delivery, consumed: float) -> float:
    """Return the samples/s expected end to end of a plan that consumes so many by itself.

    Without workers, loading and training take turns; with workers they overlap.
    """
    if delivery.settings.num_workers == 0:
        return 1 / (1 / consumed + 1 / delivery.samples_per_second)
    return min(consumed, MARGIN * delivery.samples_per_second)


def next_workers(deliveries: Sequence[Delivery], consumed: float, host: Host) -> int | None:
    """Return how many workers to measure next; None: enough is known.

    Args:
        deliveries: so far; the first is without workers.
        consumed: samples/s of the plan by itself.
        host: what it offers.
    """
    if any(expected_speed(each, consumed) >= KEEPS_UP * consumed for each in deliveries):
        return None
    alone = deliveries[0]
    rates = {d.settings.num_workers: d.samples_per_second for d in deliveries}
    with_workers = sorted(set(rates) - {0})
    largest = with_workers[-1] if with_workers else 0
    most = host.most_workers(deliveries)
    if not with_workers:
        wanted = math.ceil(consumed / (MARGIN * alone.samples_per_second))
        return min(wanted, most) or None
    before = [rates[count] for count in with_workers if 2 * count <= largest]
    more = min(2 * largest, most)
    if more > largest and (not before or rates[largest] >= _GAIN * before[-1]):
        return more
    # As many as may be tried are too few: as good may be fewer, where something else is the limit
    fewest = with_workers[0]
    is_as_good = rates[fewest] >= CLOSE * max(rates.values())
    return fewest // 2 if is_as_good and fewest > 1 else None


def chosen(deliveries: Sequence[Delivery], consumed: float) -> Delivery:
    """Return the fewest workers among those that are as good as the best."""
    expected = {id(each): expected_speed(each, consumed) for each in deliveries}
    good = [d for d in deliveries if expected[id(d)] >= CLOSE * max(expected.values())]
    return min(good, key=lambda each: each.settings.num_workers)


def fastest(feedings: Sequence[Feeding]) -> Feeding:
    """Return what was fastest end to end; the least of the host among those that are as good."""
    best = max(each.samples_per_second for each in feedings)
    good = [each for each in feedings if each.samples_per_second >= CLOSE * best]
    return min(good, key=lambda f: (f.settings.batches_ahead, f.settings.pin_memory))


def bottleneck(feeding: Feeding, deliveries: Sequence[Delivery], consumed: float) -> str:
    """Return what bounds the speed end to end: "device", "loader" or "cores".

    "cores": the loader alone delivers enough, but the two take the processor from each other.
    """
    if feeding.samples_per_second >= KEEPS_UP * consumed:
        return "device"
    alone = [d for d in deliveries if d.settings.num_workers == feeding.settings.num_workers]
    enough = any(d.settings.num_workers and expected_speed(d, consumed) >= consumed for d in alone)
    return "cores" if enough else "loader"


@dataclass
class LoaderTuner:
    """Measures a workload's loader for a plan, and keeps what was measured if that ends early.

    Args:
        prober: of the workload.
        loader: as the user gave it.
        resolved: the plan.
        consumed: its samples/s by itself.
        on_gpu: whether it trains on a GPU, for which memory can be pinned.
        on_stage: called with the name of each measurement that begins.
    """

    prober: Prober
    loader: Loader
    resolved: ResolvedPlan
    consumed: float
    on_gpu: bool
    on_stage: Callable[[str], None]
    host: Host = field(default_factory=Host.here)
    deliveries: list[Delivery] = field(default_factory=list)
    feedings: list[Feeding] = field(default_factory=list)

    def run(self) -> None:
        """Measure it.

        Raises:
            SearchTimedOut, WorkerFailed: the search's time was over; or the loader hung or ended
                the worker.
            Exception: what the user's code raised.
        """
        taken = settings_taken(self.loader)
        own = own_settings(self.loader, self.resolved.plan.samples_per_step)
        pinned = self.on_gpu and "pin_memory" in taken
        workers: int | None = 0
        while workers is not None:
            prefetch = _PREFETCH if workers else None
            tried = replace(own, num_workers=workers, prefetch_factor=prefetch, pin_memory=pinned)
            self._deliver(tried)
            keeps = self._keeps_workers
            workers = None if keeps else next_workers(self.deliveries, self.consumed, self.host)
        if own.num_workers not in {each.settings.num_workers for each in self.deliveries}:
            self._deliver(own)
        allowed = self.deliveries
        if self._keeps_workers:
            allowed = [d for d in allowed if _same_workers(d.settings, own)]
        best = self._feed(chosen(allowed, self.consumed).settings)
        if own != best.settings:
            self._feed(own)
        unpinned = replace(best.settings, pin_memory=False)
        if unpinned not in (best.settings, own):
            self._feed(unpinned)
        best = fastest(self.feedings)
        for factor in _MORE_PREFETCH if "prefetch_factor" in taken else ():
            alone = [d for d in self.deliveries if _same_workers(d.settings, best.settings)]
            is_uneven = any(expected_speed(d, self.consumed) >= self.consumed for d in alone)
            keeps_up = best.samples_per_second >= KEEPS_UP * self.consumed
            if keeps_up or not is_uneven or not best.settings.num_workers:
                return
            if not self._has_room(best.settings, factor):
                return
            self._feed(replace(best.settings, prefetch_factor=factor))
            best = fastest(self.feedings)

    def facts(self) -> dict[str, Any]:
        """Return what was measured, and what it recommends, as the report keeps it."""
        known: dict[str, Any] = {
            "settings": None,
            "bottleneck": None,
            "host_bytes": None,
            "most_workers": self.host.most_workers(self.deliveries) if self.deliveries else None,
            "keeps_workers": self._keeps_workers,
        }
        if self.feedings:
            best = fastest(self.feedings)
            held = [d for d in self.deliveries if _same_workers(d.settings, best.settings)]
            workers = held[0].worker_bytes or 0 if held else 0
            ahead = best.settings.batches_ahead * self.deliveries[0].batch_bytes
            known |= {
                "settings": asdict(best.settings),
                "bottleneck": bottleneck(best, self.deliveries, self.consumed),
                "host_bytes": ahead + workers,
            }
        own = own_settings(self.loader, self.resolved.plan.samples_per_step)
        return known | {
            "own_settings": asdict(own),
            "consumed_samples_per_second": self.consumed,
            "delivered": [asdict(each) for each in self.deliveries],
            "end_to_end": [asdict(each) for each in self.feedings],
        }

    @property
    def _keeps_workers(self) -> bool:
        return any(each.is_stream for each in self.deliveries)

    def _has_room(self, settings: LoaderSettings, factor: int) -> bool:
        ahead = settings.num_workers * factor * self.deliveries[0].batch_bytes
        free = min(self.host.free_bytes, self.host.shared_bytes or self.host.free_bytes)
        return ahead <= _SHARE_OF_HOST * free

    def _deliver(self, settings: LoaderSettings) -> Delivery:
        self.on_stage(f"measuring the loader alone: {settings}")
        self.deliveries.append(self.prober.run(partial(deliver, settings=settings)))
        return self.deliveries[-1]

    def _feed(self, settings: LoaderSettings) -> Feeding:
        self.on_stage(f"training on what the loader delivers: {settings}")
        function = partial(feed, resolved=self.resolved, settings=settings)
        self.feedings.append(self.prober.run(function))
        return self.feedings[-1]


def _same_workers(one: LoaderSettings, other: LoaderSettings) -> bool:
    return one.num_workers == other.num_workers
