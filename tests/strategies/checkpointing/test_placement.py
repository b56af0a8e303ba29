"""Placements: what each gives back and costs, and which are worth a level."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

from autofit.plan import thinned

placement, timeline = (
    importlib.import_module(f"autofit.strategies.checkpointing.{name}")
    for name in ("placement", "timeline")
)


def _chain(seed: int, units: int = 8) -> tuple[Any, dict[str, float]]:
    """A random chain of units, some with two smaller ones within, and their seconds."""
    generator = random.Random(seed)
    storages: list[Any] = []
    calls: list[Any] = []
    seconds: dict[str, float] = {}
    for number in range(units):
        start = len(storages)
        for _ in range(generator.randint(2, 6)):
            position = len(storages)
            storages.append(timeline.Storage(generator.randint(50, 900) * 1000, position, position))
        name = f"unit{number}"
        calls.append(timeline.Call(name, start, len(storages), (start,)))
        seconds[name] = generator.uniform(1, 5)
        if number % 3 == 0 and len(storages) - start >= 4:
            middle = start + 2
            for half, (begin, end) in enumerate([(start, middle), (middle, len(storages))]):
                calls.append(timeline.Call(f"{name}.{half}", begin, end, (begin,)))
                seconds[f"{name}.{half}"] = seconds[name] / 2
    return timeline.Timeline(storages, calls), seconds


def _without_nesting(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            if not any(a != b and b.startswith(f"{a}.") for a in chosen for b in chosen):
                yield chosen


@pytest.mark.parametrize("seed", range(2))
def test_no_placement_beats_the_frontier_by_much_and_the_least_peak_is_found(seed: int) -> None:
    chain, seconds = _chain(seed, units=7)
    found = placement.frontier(chain, seconds)
    assert found[0].units == ()
    forward_s = sum(s for name, s in seconds.items() if "." not in name)
    everything = [
        (chain.peak(units), sum(seconds[unit] for unit in units))
        for units in _without_nesting(list(chain.calls_of))
    ]
    lowest, plain = min(peak for peak, _ in everything), chain.peak(())
    assert found[-1].peak_bytes <= lowest + plain / 1000
    losses = []
    for number in range(1, 40):
        ceiling = lowest + (plain - lowest) * number / 40
        best = min(cost for peak, cost in everything if peak <= ceiling)
        own = min(p.recompute_s for p in found if p.peak_bytes <= ceiling)
        losses.append((own - best) / forward_s)
    assert max(losses) < 0.08
    assert sum(losses) / len(losses) < 0.01


@pytest.mark.parametrize("seed", range(6))
def test_units_are_never_nested_and_points_never_dominated(seed: int) -> None:
    chain, seconds = _chain(seed)
    found = placement.frontier(chain, seconds)
    assert all(each.units in _without_nesting(each.units) for each in found)
    for one, other in pairwise(found):
        assert other.peak_bytes < one.peak_bytes
        assert other.recompute_s > one.recompute_s


def test_a_layer_shared_with_a_unit_is_not_nested_in_it() -> None:
    """It runs alone and then within the unit; either may be chosen, and never both."""
    storages = [timeline.Storage(100, place, place) for place in range(20)]
    calls = [
        timeline.Call("shared", 0, 5, (0,)),
        timeline.Call("unit", 5, 12, (5,)),
        timeline.Call("shared", 6, 11, (6,)),
        timeline.Call("third", 12, 18, (12,)),
    ]
    found = timeline.Timeline(storages, calls)
    assert not found.are_apart({"shared", "unit"})
    assert found.are_apart({"shared", "third"})
    placements = placement.frontier(found, {"shared": 2.0, "unit": 1.5, "third": 1.0})
    assert len(placements) > 2
    assert all(found.are_apart(p.units) for p in placements)


def test_placements_that_differ_in_time_by_a_rounding_are_one_point() -> None:
    sums = {0.1 + 0.2: 70, 0.3: 80}
    assert len(sums) == 2
    plain = placement.Placement((), 100, 0.0)
    least = placement.Placement(("all",), 50, 0.4)
    tied = [placement.Placement((str(peak),), peak, seconds) for seconds, peak in sums.items()]
    assert placement.undominated([least, *tied, plain]) == [plain, tied[0], least]


@pytest.mark.parametrize("storages", [[], [timeline.Storage(100, 0, 0)]])
def test_a_timeline_without_units_has_one_placement(storages: list[Any]) -> None:
    (only,) = placement.frontier(timeline.Timeline(storages, []), {})
    assert (only.units, only.peak_bytes) == ((), sum(3 * each.nbytes for each in storages))


def _placements(points: Sequence[tuple[int, float]]) -> list[Any]:
    return [placement.Placement((str(n),), *point) for n, point in enumerate(points)]


@pytest.mark.parametrize("levels", [2, 4, 6])
def test_thinning_keeps_both_ends_and_spreads_evenly(levels: int) -> None:
    placements = _placements([(100 - number, float(number)) for number in range(31)])
    kept = thinned(placements, levels)
    assert (kept[0], kept[-1]) == (placements[0], placements[-1])
    gaps = {round(b.recompute_s - a.recompute_s) for a, b in pairwise(kept)}
    assert len(kept) == levels
    assert max(gaps) - min(gaps) <= 1


def test_steps_that_save_next_to_nothing_are_dropped() -> None:
    points = [(1000, 0.0), (995, 0.1), (700, 1.0), (699, 1.1), (500, 2.0), (498, 3.0)]
    kept = placement.spread(_placements(points))
    assert [p.peak_bytes for p in kept] == [1000, 700, 498], "the least memory stays on offer"


# -- What a timeline says a placement holds, on cases small enough to count by hand


def test_what_another_unit_needs_too_stays() -> None:
    storages = [
        timeline.Storage(10, 0, 0),
        timeline.Storage(50, 1, 3),
        timeline.Storage(20, 2, 2),
    ]
    calls = [timeline.Call("one", 0, 2, (0,)), timeline.Call("two", 2, 4, ())]
    found = timeline.Timeline(storages, calls)
    assert found.gain("one") == 0
    assert found.gain("two") == 20


def test_every_call_of_a_shared_unit_counts() -> None:
    storages = [timeline.Storage(10, place, place) for place in range(6)]
    calls = [timeline.Call("shared", 2 * i, 2 * i + 2, (2 * i,)) for i in range(3)]
    found = timeline.Timeline(storages, calls)
    assert found.gain("shared") == 30
    assert found.peak(["shared"]) == 30 + 10 + 20, "three inputs, one call brought back, gradients"
