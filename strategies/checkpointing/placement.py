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

from .saved_tensors import Timeline

# Rounds to find the lowest ceiling that can be met, each finer by so much as it tries ceilings; and
# ceilings from that on.
ROUNDS, CEILINGS_A_ROUND, CEILINGS = 3, 12, 40

# Steps in which the knapsack counts released bytes.
QUANTA = 2048

# Share by which sums of the same seconds may differ.
ROUNDING = 1e-9

# Share of what training holds without checkpointing that a level must save over the last one.
LEAST_STEP = 0.01


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
    """A stretch of the forward pass that may be recomputed.

    Attributes:
        name: for the caller.
        seconds: cost of recomputing it; infinite where it cannot be.
        released_bytes: bytes not held if it is recomputed.
        within_bytes: most bytes at once in its backward pass if nothing before is released.
        start, end: where it runs, as a half-open stretch; stretches are nested or apart.
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
    names = [unit for unit in timeline.calls_of if timeline.gain(unit) > 0]
    items = _items(timeline, names, seconds)
    peak = timeline.peak(())

    def solved(lowest: float, highest: float, count: int) -> list[Placement]:
        ceilings = [lowest + (highest - lowest) * number / count for number in range(count)]
        chosen = cheapest(items, timeline.saved_bytes, ceilings)
        # In one order whatever the hashes: of placements that are alike the first is kept
        placed = dict.fromkeys(
            tuple(items[index].name for index in indices) for indices in sorted(chosen)
        )
        return [
            Placement(units, timeline.peak(units), fsum(seconds[unit] for unit in units))
            for units in placed
            if timeline.are_apart(frozenset(units))
        ]

    found = [Placement((), peak, 0.0)]
    lowest, step = float(peak), float(peak)
    for _ in range(ROUNDS):
        found += solved(lowest - step, lowest, CEILINGS_A_ROUND)
        lowest = min(placement.peak_bytes for placement in found)
        step /= CEILINGS_A_ROUND
    return undominated([*found, *solved(lowest, peak, CEILINGS)])


def _items(timeline: Timeline, names: Sequence[str], seconds: Mapping[str, float]) -> list[Item]:
    """Return the units by their first calls, and the stretches between, which must fit as well."""
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
    """Return those that need less memory than every faster one, fastest first.

    Of those that take as long but for a rounding, the one that needs least.
    """
    kept: list[Placement] = []
    for placement in sorted(placements, key=lambda p: (p.recompute_s, p.peak_bytes)):
        if not kept:
            kept.append(placement)
        elif placement.peak_bytes < kept[-1].peak_bytes:
            if placement.recompute_s <= kept[-1].recompute_s * (1 + ROUNDING):
                kept.pop()
            kept.append(placement)
    return kept


def spread(placements: Sequence[Placement]) -> list[Placement]:
    """Drop the placements that save next to nothing beyond the one before."""
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


def cheapest(
    items: Sequence[Item], held_bytes: int, ceilings: Sequence[float]
) -> set[tuple[int, ...]]:
    """Return, for each ceiling, the indices of the items that meet it in the least time.

    Items come in the order they run, an outer one before those within it. The state is how many
    bytes the items chosen so far release, in quanta, rounded to the nearest. An item runs its
    backward pass while all its activations are there, so it fits under a ceiling only together
    with what is still held when its turn comes. Choosing an item skips those within it.

    Args:
        items: ordered by start, then by falling end.
        held_bytes: bytes held at the end of the forward pass if nothing is released.
        ceilings: bytes; one that cannot be met has no solution.
    """
    if not items:
        return set()
    quantum = max(1.0, held_bytes / (QUANTA - 1))
    quanta = [round(item.released_bytes / quantum) for item in items]
    after = [_next_outside(items, index) for index in range(len(items))]
    allowed = torch.tensor(ceilings).unsqueeze(1)
    released = (torch.arange(QUANTA) * quantum).unsqueeze(0)
    last = _time_or_never(torch.zeros(1), held_bytes - released <= allowed)
    later: dict[int, torch.Tensor] = {len(items): last}
    takes = torch.zeros(len(items), len(ceilings), QUANTA, dtype=torch.bool)
    for index in reversed(range(len(items))):
        fits = items[index].within_bytes - released <= allowed
        taken = _moved(later[after[index]], quanta[index]) + items[index].seconds
        taken = _time_or_never(taken, fits)
        is_outer = after[index] > index + 1  # then the items within it look after themselves
        left = later[index + 1] if is_outer else _time_or_never(later[index + 1], fits)
        takes[index] = taken < left
        later[index] = torch.minimum(taken, left)
        _forget(later, after, index)
    return _walk(takes, quanta, after, later[0][:, 0].isfinite())


def _walk(
    takes: torch.Tensor, quanta: Sequence[int], after: Sequence[int], can_be_met: torch.Tensor
) -> set[tuple[int, ...]]:
    """Follow the choices from the first item on, for all ceilings at once."""
    rows = torch.arange(takes.shape[1])
    state = torch.zeros_like(rows)
    resume = torch.zeros_like(rows)
    chosen = torch.zeros(takes.shape[:2], dtype=torch.bool)
    for index in range(len(quanta)):
        take = takes[index, rows, state] & (resume <= index)
        chosen[index] = take
        state = torch.where(take, (state + quanta[index]).clamp(max=QUANTA - 1), state)
        resume = torch.where(take, after[index], resume)
    return {
        tuple(column.nonzero().flatten().tolist())
        for column, met in zip(chosen.T, can_be_met.tolist(), strict=True)
        if met
    }


def _time_or_never(seconds: torch.Tensor, possible: torch.Tensor) -> torch.Tensor:
    return torch.where(possible, seconds, torch.inf)


def _moved(seconds: torch.Tensor, quanta: int) -> torch.Tensor:
    """Return a table whose column q is column q + quanta, or the last one beyond it."""
    beyond = min(quanta, QUANTA - 1)
    return torch.cat([seconds[:, beyond:], seconds[:, -1:].expand(-1, beyond)], 1)


def _next_outside(items: Sequence[Item], index: int) -> int:
    """Return the first item after `index` that does not lie within it."""
    following = range(index + 1, len(items))
    return next((i for i in following if items[i].start >= items[index].end), len(items))


def _forget(later: dict[int, torch.Tensor], after: Sequence[int], index: int) -> None:
    """Drop the tables that no item before `index` reads."""
    needed = {index, *after[:index]}
    for key in [key for key in later if key not in needed]:
        del later[key]
