"""The best placements: for each amount of memory, the units whose recomputation costs least.

Ceilings on the peak, from what training holds without it downwards, are each met by the cheapest
units, a knapsack along the forward pass. The timeline then computes the peak of each placement, and
placements that another one beats in both memory and time are dropped.

Sources: the knapsack by dynamic programming of Kellerer, Pferschy and Pisinger, Knapsack Problems,
2004, chapter 2; the memory of a chain of Herrmann et al., Optimal checkpointing for heterogeneous
chains, 2019, with whole items recomputed and never a checkpoint within a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, inf

import torch

from .timeline import Timeline

# Rounds to find the lowest ceiling that can be met, each finer by so much as it tries ceilings; and
# ceilings from that on.
ROUNDS, CEILINGS_A_ROUND, CEILINGS = 3, 12, 40

# Steps in which the knapsack counts released bytes.
QUANTA = 2048

# Share by which sums of the same seconds may differ.
ROUNDING = 1e-9

# Share of what training holds without checkpointing that a level must save over the last one.
MIN_STEP = 0.01


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


@dataclass(frozen=True)
class Item:
    """A span of the forward pass that may be recomputed.

    Attributes:
        name: of the unit; "" where it cannot be recomputed.
        seconds: cost of recomputing it.
        released_bytes: bytes not held if it is recomputed.
        within_bytes: most bytes at once in its backward pass if nothing before is released.
        start, end: where it runs, as a half-open span; spans are nested or apart.
    """

    name: str
    seconds: float
    released_bytes: int
    within_bytes: int
    start: int
    end: int


def frontier(timeline: Timeline, seconds: Mapping[str, float]) -> list[Placement]:
    """Return placements that no other beats in both memory and time, from none to least memory.

    Args:
        timeline: its units are the candidates.
        seconds: forward time of each unit, over all its calls.
    """
    items = _items(timeline, seconds)
    peak = timeline.peak(())
    found: dict[tuple[str, ...], Placement] = {(): Placement((), peak, 0.0)}

    def solve(lowest: float, highest: float, count: int) -> None:
        for number in range(count):
            ceiling = lowest + (highest - lowest) * number / count
            units = cheapest(items, timeline.saved_bytes, ceiling)
            if units is not None and units not in found and timeline.are_apart(units):
                recompute_s = fsum(seconds[unit] for unit in units)
                found[units] = Placement(units, timeline.peak(units), recompute_s)

    lowest, step = float(peak), float(peak)
    for _ in range(ROUNDS):
        solve(lowest - step, lowest, CEILINGS_A_ROUND)
        lowest = min(placement.peak_bytes for placement in found.values())
        step /= CEILINGS_A_ROUND
    solve(lowest, peak, CEILINGS)
    return undominated(found.values())


def _items(timeline: Timeline, seconds: Mapping[str, float]) -> list[Item]:
    """Return the units by their first calls, and the spans between, which must fit as well."""
    calls = [c[0] for unit, c in timeline.calls_of.items() if timeline.gain(unit) > 0]
    spans = {(call.start, call.end) for call in calls}
    items = [
        Item(
            call.unit,
            seconds[call.unit],
            timeline.gain(call.unit),
            timeline.most_within(call.start, call.end),
            call.start,
            call.end,
        )
        for call in calls
    ]
    for start, end in pairwise(sorted({0, timeline.end, *(p for span in spans for p in span)})):
        within_bytes = timeline.most_within(start, end)
        if within_bytes and (start, end) not in spans:
            items.append(Item("", inf, 0, within_bytes, start, end))
    return sorted(items, key=lambda item: (item.start, -item.end, not item.name))


def undominated(placements: Iterable[Placement]) -> list[Placement]:
    """Return those that need less memory than every faster one, fastest first.

    Of those that take as long but for a rounding, the one that needs least.
    """
    kept: list[Placement] = []
    for placement in sorted(placements, key=lambda p: (p.recompute_s, p.peak_bytes)):
        if kept and placement.peak_bytes >= kept[-1].peak_bytes:
            continue
        if kept and placement.recompute_s <= kept[-1].recompute_s * (1 + ROUNDING):
            kept.pop()
        kept.append(placement)
    return kept


def spread(placements: Sequence[Placement]) -> list[Placement]:
    """Drop the placements that save next to nothing beyond the one before."""
    min_step = MIN_STEP * placements[0].peak_bytes
    kept = [placements[0]]
    for placement in placements[1:]:
        if kept[-1].peak_bytes - placement.peak_bytes >= min_step:
            kept.append(placement)
    if len(kept) > 1:
        kept[-1] = placements[-1]
    return kept


def cheapest(
    items: Sequence[Item], held_bytes: int, ceiling_bytes: float
) -> tuple[str, ...] | None:
    """Return the units that meet the ceiling in the least time; None: nothing does.

    Items come in the order they run, an outer one before those within it. The state is how many
    bytes the items chosen so far release, in quanta, rounded to the nearest. An item runs its
    backward pass while all its activations are there, so it fits under a ceiling only together
    with what is still held when its turn comes. Choosing an item skips those within it.

    Args:
        items: ordered by start, then by falling end.
        held_bytes: bytes held at the end of the forward pass if nothing is released.
        ceiling_bytes: most bytes at any time.
    """
    quantum = max(1.0, held_bytes / (QUANTA - 1))
    states = torch.arange(QUANTA)
    released = states * quantum
    # From each item on: the least seconds in each state. Infinite: the ceiling cannot be met
    later = [torch.zeros(QUANTA)] * len(items)
    later += [torch.zeros(QUANTA).masked_fill(held_bytes - released > ceiling_bytes, inf)]
    chosen: list[torch.Tensor] = []
    after = [_next_outside(items, index) for index in range(len(items))]
    more = [round(item.released_bytes / quantum) for item in items]
    for index, item in reversed(list(enumerate(items))):
        too_large = item.within_bytes - released > ceiling_bytes
        reached = (states + more[index]).clamp(max=QUANTA - 1)
        taken = (later[after[index]][reached] + item.seconds).masked_fill(too_large, inf)
        left = later[index + 1]
        if after[index] == index + 1:  # else the items within it look after themselves
            left = left.masked_fill(too_large, inf)
        chosen.insert(0, taken < left)
        later[index] = torch.minimum(taken, left)
    if later[0][0] == inf:
        return None
    names: list[str] = []
    index = state = 0
    while index < len(items):
        if chosen[index][state]:
            names.append(items[index].name)
            state = min(state + more[index], QUANTA - 1)
            index = after[index]
        else:
            index += 1
    return tuple(names)


def _next_outside(items: Sequence[Item], index: int) -> int:
    """Return the first item after `index` that does not lie within it."""
    following = range(index + 1, len(items))
    return next((i for i in following if items[i].start >= items[index].end), len(items))
