"""The numbers of workers that are tried and chosen, in worlds whose loaders are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autofit.plan import Plan, ResolvedPlan
from autofit.probing.loader import Delivery, Feeding, deliver
from autofit.searching.loader import (
    Host,
    LoaderTuner,
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


def any_numbers(**numbers: Any) -> Any:
    raise AssertionError("it is recorded")


class Recorded:
    """A prober whose loaders deliver at known rates, and a plan that takes what they deliver.

    Args:
        alone: samples/s of a loader by its settings.
        fed: samples/s end to end by them.
        is_stream: whether it reads an `IterableDataset`.
    """

    def __init__(
        self,
        alone: Callable[[LoaderSettings], float],
        fed: Callable[[LoaderSettings], float],
        is_stream: bool = False,
    ) -> None:
        self.alone, self.fed, self.is_stream = alone, fed, is_stream
        self.asked: list[tuple[str, int, bool, int | None]] = []

    def run(self, function: Any) -> Delivery | Feeding:
        settings: LoaderSettings = function.keywords["settings"]
        is_alone = function.func is deliver
        numbers = settings.num_workers, settings.pin_memory, settings.prefetch_factor
        self.asked.append(("alone" if is_alone else "fed", *numbers))
        if not is_alone:
            return Feeding(settings, self.fed(settings), 0.5)
        held = settings.num_workers * 2**20
        return Delivery(settings, self.alone(settings), 0.1, 2**20, held, self.is_stream)


def tuner_of(
    prober: Any,
    consumed: float,
    loader: Any = any_numbers,
    *,
    on_gpu: bool = False,
    host: Host = ROOMY,
) -> LoaderTuner:
    plan = ResolvedPlan(Plan(16))
    return LoaderTuner(prober, loader, plan, consumed, on_gpu, lambda _: None, host)


def tuned(prober: Recorded, *given: Any, **options: Any) -> LoaderTuner:
    tuner = tuner_of(prober, *given, **options)
    tuner.run()
    assert len(set(prober.asked)) == len(prober.asked)  # nothing is measured twice
    return tuner


def at(rates: Callable[[int], float]) -> Callable[[LoaderSettings], float]:
    return lambda settings: rates(settings.num_workers)


def test_the_fewest_workers_that_keep_up_are_fed_and_then_the_users_own() -> None:
    prober = Recorded(at(waits), at(lambda workers: {0: 40.0, 4: 178.0}[workers]))
    facts = tuned(prober, 180).facts()
    assert prober.asked == [
        ("alone", 0, False, None),
        ("alone", 4, False, 2),
        ("fed", 4, False, 2),
        ("fed", 0, False, None),
    ]
    assert facts["settings"]["num_workers"] == 4
    assert (facts["bottleneck"], facts["host_bytes"]) == ("device", (4 * 2 + 4) * 2**20)


def test_a_loader_that_keeps_up_without_workers_is_fed_once() -> None:
    prober = Recorded(at(lambda _: 1e6), at(lambda _: 99.0))
    assert tuned(prober, 100).facts()["bottleneck"] == "device"
    assert prober.asked == [("alone", 0, False, None), ("fed", 0, False, None)]


def test_the_users_own_workers_are_measured_too() -> None:
    live = DataLoader(TensorDataset(), 4, num_workers=2, prefetch_factor=6, pin_memory=True)
    prober = Recorded(at(lambda _: 1e6), at(lambda workers: 60.0 if workers else 99.0))
    facts = tuned(prober, 100, live).facts()
    assert prober.asked == [
        ("alone", 0, False, None),
        ("alone", 2, True, 6),
        ("fed", 0, False, None),
        ("fed", 2, True, 6),
    ]
    assert facts["settings"]["num_workers"] == 0
    assert facts["own_settings"]["num_workers"] == 2


@pytest.mark.parametrize(("pinned_rate", "is_pinned"), [(179.0, True), (150.0, False)])
def test_on_a_gpu_memory_is_pinned_and_the_same_tried_without(
    pinned_rate: float, is_pinned: bool
) -> None:
    prober = Recorded(at(waits), lambda s: pinned_rate if s.pin_memory else 160.0)
    facts = tuned(prober, 180, on_gpu=True).facts()
    assert prober.asked == [
        ("alone", 0, True, None),
        ("alone", 4, True, 2),
        ("fed", 4, True, 2),
        ("fed", 0, False, None),
        ("fed", 4, False, 2),
    ]
    if is_pinned:
        assert facts["settings"]["pin_memory"]
    else:  # 0 workers, not pinned, are as good and the least
        assert facts["settings"] == facts["own_settings"]


def test_on_a_gpu_own_settings_that_differ_in_pinning_alone_are_fed_once() -> None:
    prober = Recorded(at(lambda _: 1e6), at(lambda _: 99.0))
    tuned(prober, 100, on_gpu=True)
    assert prober.asked == [
        ("alone", 0, True, None),
        ("fed", 0, True, None),
        ("fed", 0, False, None),
    ]


def only_workers(batch_size: int, num_workers: int) -> Any:
    raise AssertionError("it is recorded")


def test_what_a_function_does_not_take_is_not_tried() -> None:
    prober = Recorded(at(waits), at(lambda workers: 20.0 * (workers + 1)))
    tuned(prober, 180, only_workers, on_gpu=True)
    assert [asked for asked in prober.asked if asked[0] == "fed"] == [
        ("fed", 4, False, 2),
        ("fed", 0, False, None),
    ]


@pytest.mark.parametrize(
    ("rates", "factors"),
    [
        ({2: 120.0, 4: 150.0, 8: 160.0}, [2, 4, 8]),
        ({2: 120.0, 4: 175.0}, [2, 4]),
        ({2: 175.0}, [2]),
    ],
)
def test_more_is_loaded_ahead_until_the_plan_is_kept_busy(
    rates: dict[int, float], factors: list[int]
) -> None:
    """Alone it delivers enough, and yet the plan waits: batches take unequal times."""

    def fed(settings: LoaderSettings) -> float:
        return rates[settings.prefetch_factor] if settings.prefetch_factor else 30.0

    prober = Recorded(at(lambda workers: 75.0 * max(1, workers)), fed)
    facts = tuned(prober, 180).facts()
    tried = [factor for kind, _, _, factor in prober.asked if kind == "fed" and factor]
    assert tried == factors
    assert facts["settings"]["prefetch_factor"] == factors[-1]


def test_more_is_not_loaded_ahead_where_the_loader_is_too_slow_or_the_host_full() -> None:
    slow = Recorded(at(lambda workers: 10.0 * min(4, max(1, workers))), at(lambda w: 9.0 * (w + 1)))
    tuned(slow, 180)
    assert all(factor in (None, 2) for _, _, _, factor in slow.asked)
    uneven = Recorded(at(lambda workers: 75.0 * max(1, workers)), at(lambda w: 30.0 * (w + 1)))
    full = replace(ROOMY, shared_bytes=14 * 2**20)  # 3 workers x 2 batches of 1 MiB, not x 4
    tuned(uneven, 180, host=full)
    assert ("fed", 3, False, 2) in uneven.asked
    assert all(factor in (None, 2) for _, _, _, factor in uneven.asked)


class Stream(IterableDataset[Any]):
    """Says nothing of how its copies share the samples out."""

    def __iter__(self) -> Any:
        raise AssertionError("it is recorded")


@pytest.mark.parametrize("rate", [waits, lambda _: 1e9])
@pytest.mark.parametrize("own", [0, 2])
def test_of_a_stream_the_workers_stay_the_users(own: int, rate: Callable[[int], float]) -> None:
    """Others may deliver each sample several times, and faster."""
    live = DataLoader(Stream(), 4, num_workers=own)
    prober = Recorded(at(rate), at(rate), is_stream=True)
    facts = tuned(prober, 1e6, live, on_gpu=True).facts()
    assert {asked[1] for asked in prober.asked if asked[0] == "fed"} == {own}
    assert {asked[1] for asked in prober.asked} == {0, own}
    assert facts["settings"]["num_workers"] == own
    assert facts["keeps_workers"]


def test_what_was_measured_before_an_end_is_kept() -> None:
    class Ends(Recorded):
        def run(self, function: Any) -> Delivery | Feeding:
            if len(self.asked) == 3:
                raise TimeoutError
            return super().run(function)

    tuner = tuner_of(Ends(at(waits), at(lambda _: 178.0)), 180)
    with pytest.raises(TimeoutError):
        tuner.run()
    facts = tuner.facts()
    assert [each["settings"]["num_workers"] for each in facts["delivered"]] == [0, 4]
    assert facts["settings"]["num_workers"] == 4
    assert facts["bottleneck"] == "device"
