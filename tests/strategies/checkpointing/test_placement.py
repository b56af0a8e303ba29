"""The knapsack and the frontier against brute force, and levels thinned for the least loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

Part = Callable[[str], Any]


def _chain(part: Part, seed: int, units: int = 8) -> tuple[Any, dict[str, float]]:
    """A random chain of units, some with two smaller ones within, and their seconds."""
    timeline, generator = part("timeline"), random.Random(seed)
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


@pytest.mark.parametrize("seed", range(6))
def test_no_placement_beats_the_frontier_by_much(part: Part, seed: int) -> None:
    timeline, seconds = _chain(part, seed)
    found = part("frontier").frontier(timeline, seconds)
    forward_s = sum(s for name, s in seconds.items() if "." not in name)
    everything = [
        (timeline.peak(units), sum(seconds[unit] for unit in units))
        for units in _without_nesting(list(timeline.calls_of))
    ]
    lowest, plain = min(peak for peak, _ in everything), timeline.peak(())
    losses = []
    for number in range(1, 40):
        ceiling = lowest + (plain - lowest) * number / 40
        best = min(cost for peak, cost in everything if peak <= ceiling)
        own = min(p.recompute_s for p in found if p.peak_bytes <= ceiling)
        losses.append((own - best) / forward_s)
    assert max(losses) < 0.08
    assert sum(losses) / len(losses) < 0.01


@pytest.mark.parametrize("seed", range(6))
def test_units_are_never_nested_and_points_never_dominated(part: Part, seed: int) -> None:
    timeline, seconds = _chain(part, seed)
    found = part("frontier").frontier(timeline, seconds)
    assert found[0].units == ()
    for placement in found:
        assert not any(
            a != b and b.startswith(f"{a}.") for a in placement.units for b in placement.units
        )
    for one, other in pairwise(found):
        assert other.peak_bytes < one.peak_bytes
        assert other.recompute_s > one.recompute_s


def test_a_layer_shared_with_a_unit_is_not_nested_in_it(part: Part) -> None:
    """It runs alone and then within the unit; either may be chosen, and never both."""
    timeline = part("timeline")
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
    placements = part("frontier").frontier(found, {"shared": 2.0, "unit": 1.5, "third": 1.0})
    assert len(placements) > 2
    assert all(found.are_apart(p.units) for p in placements)


def test_a_timeline_without_units_has_one_placement(part: Part) -> None:
    timeline = part("timeline")
    storages = [timeline.Storage(100, 0, 0)]
    (only,) = part("frontier").frontier(timeline.Timeline(storages, []), {})
    assert only.units == ()
    (nothing,) = part("frontier").frontier(timeline.Timeline([], []), {})
    assert nothing.peak_bytes == 0


def _placements(part: Part, points: Sequence[tuple[int, float]]) -> list[Any]:
    make = part("frontier").Placement
    return [make((str(number),), *point) for number, point in enumerate(points)]


def _loss(placements: Sequence[Any], kept: Sequence[Any]) -> tuple[float, float]:
    """Extra seconds at the worst budget, and over all budgets."""
    lost = []
    for budget in range(placements[-1].peak_bytes, placements[0].peak_bytes):
        best = min(p.recompute_s for p in placements if p.peak_bytes <= budget)
        own = min(p.recompute_s for p in kept if p.peak_bytes <= budget)
        lost.append(own - best)
    return max(lost), sum(lost)


@pytest.mark.parametrize("levels", [2, 4, 6])
@pytest.mark.parametrize("seed", range(3))
def test_thinning_keeps_both_ends_and_loses_least(part: Part, levels: int, seed: int) -> None:
    generator = random.Random(seed)
    peaks = sorted(generator.sample(range(50, 200), 9), reverse=True)
    seconds = sorted(generator.sample(range(99), 9))
    placements = _placements(part, list(zip(peaks, seconds, strict=True)))
    kept = part("frontier").thinned(placements, levels)
    assert len(kept) <= levels
    assert (kept[0], kept[-1]) == (placements[0], placements[-1])
    choices = combinations(placements[1:-1], levels - 2)
    least = min(_loss(placements, [placements[0], *c, placements[-1]]) for c in choices)
    assert _loss(placements, kept) == least, "the worst budget first, then all of them"


def test_thinning_leaves_few_alone(part: Part) -> None:
    placements = _placements(part, [(100, 0.0), (60, 1.0), (10, 9.0)])
    assert part("frontier").thinned(placements, 12) == placements


def test_steps_that_save_next_to_nothing_are_dropped(part: Part) -> None:
    points = [(1000, 0.0), (995, 0.1), (700, 1.0), (699, 1.1), (500, 2.0), (498, 3.0)]
    kept = part("frontier").spread(_placements(part, points))
    assert [p.peak_bytes for p in kept] == [1000, 700, 498], "the least memory stays on offer"
