"""The best placements: for each amount of memory, the units whose recomputation costs least.

Ceilings on the peak, from what plain training holds downwards, are each met by the cheapest units
(see `knapsack`); what comes out is weighed anew by the timeline, and what another placement beats
in both memory and time is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

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
    """At most `levels` of a frontier, both ends included, that cost least time for any budget.

    A budget between two neighbours of the frontier is served by the next level that is kept; what
    is minimized is the recompute time that this adds, squared so that no budget loses much, over
    all budgets alike.
    """
    if len(placements) <= levels:
        return list(placements)
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [0])}]
    for _ in range(levels - 1):
        best.append(_one_more(placements, best[-1]))
    last = len(placements) - 1
    _, kept = min(row[last] for row in best if last in row)
    return [placements[index] for index in kept]


def _one_more(
    placements: Sequence[Placement], row: Mapping[int, tuple[float, list[int]]]
) -> dict[int, tuple[float, list[int]]]:
    grown: dict[int, tuple[float, list[int]]] = {}
    for end in range(1, len(placements)):
        options = [
            (cost + _cost_of_gap(placements, start, end), [*kept, end])
            for start, (cost, kept) in row.items()
            if start < end
        ]
        if options:
            grown[end] = min(options)
    return grown


def _cost_of_gap(placements: Sequence[Placement], start: int, end: int) -> float:
    """What budgets in between lose (s^2 x bytes) if no placement between these two is kept."""
    return sum(
        (placements[end].recompute_s - placements[index].recompute_s) ** 2
        * (placements[index - 1].peak_bytes - placements[index].peak_bytes)
        for index in range(start + 1, end)
    )
