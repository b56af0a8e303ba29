"""A knapsack along a forward pass, solved for many ceilings on the peak at once.

Items come in the order they run, an outer one before those within it. State is how many bytes the
items chosen so far release. An item runs its backward pass while all its activations are there, so
it fits under a ceiling only beside what is still held when its turn comes; choosing an item skips
those within it, so none are nested. Released bytes are counted in quanta, rounded to the nearest.

Sources: the knapsack by dynamic programming of Kellerer, Pferschy and Pisinger, Knapsack Problems,
2004, chapter 2; the memory of a chain of Herrmann et al., Optimal checkpointing for heterogeneous
chains, 2019, with whole items recomputed and never a checkpoint within a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

QUANTA = 2048


@dataclass(frozen=True)
class Item:
    """Something that may be recomputed.

    Attributes:
        name: for the caller.
        seconds: what recomputing it costs; infinite where it cannot be.
        released_bytes: what need not be held if it is.
        within_bytes: what is there at once in its backward pass if nothing before is released.
        start, end: where it runs, as a half-open stretch; stretches are nested or apart.
    """

    name: str
    seconds: float
    released_bytes: int
    within_bytes: int
    start: int
    end: int


def cheapest(
    items: Sequence[Item], held_bytes: int, ceilings: Sequence[float]
) -> set[tuple[int, ...]]:
    """For each ceiling, the indices of the items that meet it in the least time.

    Args:
        items: ordered by start, then by falling end.
        held_bytes: what is held at the end of the forward pass if nothing is released.
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
    """Follow the choices from the first item on, for all ceilings side by side."""
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
    """Column q of the result is column q + quanta, or the last one beyond it."""
    beyond = min(quanta, QUANTA - 1)
    return torch.cat([seconds[:, beyond:], seconds[:, -1:].expand(-1, beyond)], 1)


def _next_outside(items: Sequence[Item], index: int) -> int:
    """The first item after `index` that does not lie within it."""
    following = range(index + 1, len(items))
    return next((i for i in following if items[i].start >= items[index].end), len(items))


def _forget(later: dict[int, torch.Tensor], after: Sequence[int], index: int) -> None:
    """Let go of tables that no item before `index` will look at."""
    needed = {index, *after[:index]}
    for key in [key for key in later if key not in needed]:
        del later[key]
