"""The best placements: for each amount of memory, the units whose recomputation costs least.

Ceilings on the peak, from what plain training holds downwards, are each met by the cheapest units
(see `knapsack`); what comes out is weighed anew by the timeline, and what another placement beats
in both memory and time is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .knapsack import Item, cheapest
from .timeline import Timeline

CEILINGS = 48
MAX_LEVELS = 12


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
    items = [_item(timeline, name, seconds[name]) for name in names]
    peak = timeline.peak(())
    ceilings = [peak * (number + 1) / CEILINGS for number in range(CEILINGS)]
    chosen = {(), *cheapest(items, timeline.saved_bytes, ceilings)}
    return undominated(_placement(timeline, names, seconds, indices) for indices in chosen)


def _item(timeline: Timeline, unit: str, seconds: float) -> Item:
    call = timeline.calls_of[unit][0]
    within_bytes = timeline.held_until(call.end) + timeline.working_bytes(call)
    return Item(seconds, timeline.gain(unit), within_bytes, call.start, call.end)


def _placement(
    timeline: Timeline, names: Sequence[str], seconds: Mapping[str, float], indices: Sequence[int]
) -> Placement:
    units = tuple(names[index] for index in indices)
    return Placement(units, timeline.peak(units), sum(seconds[unit] for unit in units))


def undominated(placements: Iterable[Placement]) -> list[Placement]:
    """Those that need less memory than every faster one, fastest first."""
    kept: list[Placement] = []
    for placement in sorted(placements, key=lambda p: (p.recompute_s, p.peak_bytes)):
        if not kept or placement.peak_bytes < kept[-1].peak_bytes:
            kept.append(placement)
    return kept


def thinned(placements: Sequence[Placement], levels: int = MAX_LEVELS) -> list[Placement]:
    """At most `levels` of a frontier, both ends included, that cost least time for any budget.

    A budget between two neighbours of the frontier is served by the next level that is kept; what
    is minimized is the recompute time that this adds, over all budgets alike.
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
    """Recompute time added over all budgets (s x bytes) if none between these two is kept."""
    return sum(
        (placements[end].recompute_s - placements[index].recompute_s)
        * (placements[index - 1].peak_bytes - placements[index].peak_bytes)
        for index in range(start + 1, end)
    )
