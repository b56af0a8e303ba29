"""The numbers of workers that are tried and chosen, in worlds whose loaders are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autofit.probing.loader import Delivery, Feeding
from autofit.searching.loader import (
    Host,
    bottleneck,
    chosen,
    expected_speed,
    fastest,
    next_workers,
)
from autofit.training.loader import LoaderSettings

ROOMY = Host(cores=8, free_bytes=2**36, shared_bytes=2**35)


def measured(workers: int, rate: float, batch_bytes: int = 2**20) -> Delivery:
    settings = LoaderSettings(16, workers, False, 2 if workers else None)
    return Delivery(settings, rate, 0.1, batch_bytes, workers * 2**20)


def tried(
    rate: Callable[[int], float], consumed: float, host: Host = ROOMY, batch_bytes: int = 2**20
) -> list[Delivery]:
    """Return what would be measured of a loader with that rate by its workers."""
    deliveries = [measured(0, rate(0), batch_bytes)]
    while (workers := next_workers(deliveries, consumed, host)) is not None:
        deliveries.append(measured(workers, rate(workers), batch_bytes))
        assert len(deliveries) < 20
    return deliveries


def waits(workers: int) -> float:
    """Each worker waits for a disk: 50 samples/s."""
    return 50.0 * max(workers, 1)


def computes(workers: int) -> float:
    """Decoding on eight cores."""
    return 50.0 * min(max(workers, 1), 8)


def test_as_many_workers_as_the_plan_needs_and_no_more() -> None:
    deliveries = tried(waits, 180)
    assert [d.settings.num_workers for d in deliveries] == [0, 4]
    assert chosen(deliveries, 180).settings.num_workers == 4


def test_a_loader_that_takes_no_time_needs_no_workers() -> None:
    assert [d.settings.num_workers for d in tried(lambda _: 1e6, 100)] == [0]


def test_workers_that_hand_batches_on_more_slowly_than_the_training_makes_them() -> None:
    deliveries = tried(lambda workers: 1e5 if workers == 0 else 1e3, 2e4)
    assert chosen(deliveries, 2e4).settings.num_workers == 0


def test_more_workers_than_cores_where_they_wait() -> None:
    deliveries = tried(waits, 1e6)
    assert chosen(deliveries, 1e6).settings.num_workers == 32


def test_no_more_workers_than_cores_where_they_compute() -> None:
    deliveries = tried(computes, 1e6)
    assert chosen(deliveries, 1e6).settings.num_workers == 8


def test_no_more_than_the_host_has_room_for() -> None:
    shared = Host(cores=8, free_bytes=2**36, shared_bytes=2**30)
    gib_sixteenth = 2**26
    deliveries = tried(waits, 1e6, shared, gib_sixteenth)
    assert max(d.settings.num_workers for d in deliveries) == 6  # 2 x 64 MiB each, of 80 % of a GiB
    full = Host(cores=8, free_bytes=2**20, shared_bytes=None)
    assert [d.settings.num_workers for d in tried(waits, 1e6, full)] == [0]


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("gain", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("consumed", [3.0, 130.0, 900.0, 1e6])
def test_it_ends_and_chooses_what_is_nearly_the_best_of_what_it_tried(
    consumed: float, gain: float, limit: int, cores: int
) -> None:
    """Each worker delivers `gain` times what none does, until `limit` of them share the disk."""
    host = Host(cores, 2**36, None)

    def rate(workers: int) -> float:
        return 100.0 if workers == 0 else 100.0 * gain * min(workers, limit)

    deliveries = tried(rate, consumed, host)
    counts = [d.settings.num_workers for d in deliveries]
    assert len(set(counts)) == len(counts)
    assert max(counts) <= 4 * cores
    best = chosen(deliveries, consumed)
    if best.settings.num_workers:
        most = max(d.samples_per_second for d in deliveries if d.settings.num_workers)
        enough = min(consumed, most)
        assert best.samples_per_second >= 0.9 * 0.97 * enough


def fed(workers: int, rate: float, *, pinned: bool = False) -> Feeding:
    return Feeding(LoaderSettings(16, workers, pinned, 2 if workers else None), rate, 0.5)


def test_measured_speed_decides_and_a_tie_takes_the_least_of_the_host() -> None:
    assert fastest([fed(8, 100), fed(0, 50)]) == fed(8, 100)
    assert fastest([fed(8, 100), fed(0, 99)]) == fed(0, 99)
    assert fastest([fed(8, 100, pinned=True), fed(8, 99)]) == fed(8, 99)
    assert fastest([fed(8, 100, pinned=True), fed(8, 80)]) == fed(8, 100, pinned=True)


@pytest.mark.parametrize(
    ("end_to_end", "alone", "what"),
    [(98, 500, "device"), (40, 45, "loader"), (40, 500, "cores")],
)
def test_what_bounds_the_training(end_to_end: float, alone: float, what: str) -> None:
    assert bottleneck(fed(4, end_to_end), [measured(4, alone)], 100) == what


def test_without_workers_loading_and_training_take_turns() -> None:
    assert expected_speed(measured(0, 100.0), 100.0) == pytest.approx(50.0)
    assert expected_speed(measured(4, 1000.0), 100.0) == 100.0
