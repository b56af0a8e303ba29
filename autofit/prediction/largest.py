"""The largest micro-batch within a budget, by few looks at what a micro-batch needs."""

from __future__ import annotations

from collections.abc import Callable

MOST = 2**20
MOST_LOOKS = 12


def largest_that_fits(need: Callable[[int], int], budget: int, *, start: int) -> int | None:
    """The largest micro-batch whose need is within the budget, or very near it.

    Needs grow almost on a line, so the next look is where the line through the nearest looks on
    either side meets the budget. What is returned was itself looked at; after 12 looks the best
    so far is.

    Args:
        need: bytes of a micro-batch.
        budget: bytes.
        start: where to look first.

    Returns:
        None where one sample does not fit.
    """
    fits, fails = 0, MOST + 1
    looked: dict[int, int] = {}
    at = start
    for _ in range(MOST_LOOKS):
        looked[at] = need(at)
        if looked[at] <= budget:
            fits = max(fits, at)
        else:
            fails = min(fails, at)
        if fails - fits <= 1:
            break
        at = min(max(_crossing(looked, budget), fits + 1), fails - 1)
    return fits or None


def _crossing(looked: dict[int, int], budget: int) -> int:
    """Where the line through the two looks nearest the budget meets it."""
    if len(looked) == 1:
        ((only, needed),) = looked.items()
        return 2 * only if needed <= budget else max(only // 2, 1)
    (one, here), (other, there) = sorted(looked.items(), key=lambda look: abs(look[1] - budget))[:2]
    if here == there:
        return 2 * max(one, other)
    return int(one + (budget - here) * (other - one) / (there - here))
