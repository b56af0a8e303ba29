"""The best placements: for each amount of memory, the units whose recomputation costs least.

Ceilings on the peak, from what plain training holds downwards, are each met by the cheapest units
(see `knapsack`); what comes out is weighed anew by the timeline, and what another placement beats
in both memory and time is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from operator import add

from .knapsack import Item, cheapest
from .timeline import Timeline

COARSE_CEILINGS, CEILINGS = 12, 40
"""How many ceilings are tried to find the lowest that can be met, and how many above that."""

MAX_LEVELS = 12
LEAST_STEP = 0.01
"""Share of what plain training holds that a level must save beyond the one before it."""


@dataclass(frozen=True)
class Placement:
    """A set of units to checkpoint.

    Attributes:
        units: their names, in the order of the forward pass.
        peak_bytes: most bytes of activations and gradients at once, by the timeline.
        recompute_s: forward seconds of the units.
    """

    units: tuple[str, ...]
    peak_bytes: int
    recompute_s: float


def frontier(timeline: Timeline, seconds: Mapping[str, float]) -> list[Placement]:
    """Placements of which none is beaten in both memory and time, from none to least memory.

    Args:
        timeline: its units are the candidates.
        seconds: forward time of each unit, over all its calls.
    """
    names = [unit for unit in timeline.calls_of if timeline.gain(unit) > 0]
    items = _items(timeline, names, seconds)
    peak = timeline.peak(())

    def solved(lowest: float, count: int) -> list[Placement]:
        ceilings = [lowest + (peak - lowest) * number / count for number in range(count)]
        chosen = cheapest(items, timeline.saved_bytes, ceilings)
        placed = {tuple(items[index].name for index in indices) for indices in chosen}
        return [
            Placement(units, timeline.peak(units), sum(seconds[unit] for unit in units))
            for units in placed
            if timeline.are_apart(frozenset(units))
        ]

    plain = Placement((), peak, 0.0)
    coarse = [plain, *solved(0.0, COARSE_CEILINGS)]
    lowest = min(placement.peak_bytes for placement in coarse)
    return undominated([*coarse, *solved(lowest - peak / COARSE_CEILINGS, CEILINGS)])


def _items(timeline: Timeline, names: Sequence[str], seconds: Mapping[str, float]) -> list[Item]:
    """The units by their first calls, and the stretches between them, which must fit as well."""
    firsts = {name: timeline.calls_of[name][0] for name in names}
    items = [
        Item(
            name,
            seconds[name],
            timeline.gain(name),
            timeline.most_within(call.start, call.end),
            call.start,
            call.end,
        )
        for name, call in firsts.items()
    ]
    cuts = sorted({0, timeline.end, *(i.start for i in items), *(i.end for i in items)})
    of_units = {(item.start, item.end) for item in items}
    for start, end in pairwise(cuts):
        within_bytes = timeline.most_within(start, end)
        if within_bytes and (start, end) not in of_units:
            items.append(Item("", inf, 0, within_bytes, start, end))
    return sorted(items, key=lambda item: (item.start, -item.end, not item.name))


def undominated(placements: Iterable[Placement]) -> list[Placement]:
    """Those that need less memory than every faster one, fastest first."""
    kept: list[Placement] = []
    for placement in sorted(placements, key=lambda p: (p.recompute_s, p.peak_bytes)):
        if not kept or placement.peak_bytes < kept[-1].peak_bytes:
            kept.append(placement)
    return kept


def spread(placements: Sequence[Placement]) -> list[Placement]:
    """A frontier without the placements that save next to nothing beyond the one before."""
    if not placements:
        return []
    least_step = LEAST_STEP * placements[0].peak_bytes
    kept = [placements[0]]
    for placement in placements[1:]:
        if kept[-1].peak_bytes - placement.peak_bytes >= least_step:
            kept.append(placement)
    if kept[-1] != placements[-1] and len(kept) > 1:
        kept[-1] = placements[-1]
    return kept


def thinned(placements: Sequence[Placement], levels: int = MAX_LEVELS) -> list[Placement]:
    """At most `levels` of a frontier, both ends included, that lose little time for any budget.

    A budget between two neighbours of the frontier is served by the next level that is kept. No
    choice of levels loses less at the budget where it loses most; among those that lose no more
    there, this one loses the least bytes x seconds over all budgets.
    """
    if len(placements) <= levels:
        return list(placements)
    worst_s, _ = _fewest(placements, levels, partial(_worst_in_gap, placements), max)

    def lost(start: int, end: int) -> float:
        is_too_wide = _worst_in_gap(placements, start, end) > worst_s
        return inf if is_too_wide else _lost_in_gap(placements, start, end)

    _, kept = _fewest(placements, levels, lost, add)
    return [placements[index] for index in kept]


def _fewest(
    placements: Sequence[Placement],
    levels: int,
    cost_of_gap: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least cost of a way from the first placement to the last over so many, and the way."""
    ways: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(levels - 1):
        ways |= {
            end: min(
                (join(cost, cost_of_gap(start, end)), [*kept, end])
                for start, (cost, kept) in ways.items()
                if start < end
            )
            for end in range(1, len(placements))
        }
    return ways[len(placements) - 1]


def _worst_in_gap(placements: Sequence[Placement], start: int, end: int) -> float:
    """Most seconds that a budget loses if no placement between these two is kept."""
    return placements[end].recompute_s - placements[start + 1].recompute_s


def _lost_in_gap(placements: Sequence[Placement], start: int, end: int) -> float:
    """Bytes x seconds that budgets lose if no placement between these two is kept."""
    return sum(
        (placements[end].recompute_s - placements[index].recompute_s)
        * (placements[index - 1].peak_bytes - placements[index].peak_bytes)
        for index in range(start + 1, end)
    )
