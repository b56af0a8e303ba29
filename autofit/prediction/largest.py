"""The largest micro-batch within a budget, by few looks at what a micro-batch needs."""

from __future__ import annotations

import math
from collections.abc import Callable

MOST = 2**36
"""More samples than any GPU has bytes for."""
MOST_LOOKS = 24
_STRIDE = 16
_FINE = 1000  # nobody trains with 123,457 samples rather than 123,400


def largest_that_fits(need: Callable[[int], int], budget: int, *, start: int) -> int | None:
    """The largest micro-batch whose need is within the budget, or very near it.

    Needs grow almost on a line, in steps (an allocator's segments) that may be long. So the next
    look is where the line through the nearest looks meets the budget; where two looks in a row fell
    on the same side of it, the middle between the bounds, of their logarithms where they lie far
    apart. What is returned was itself looked at; after 24 looks it is the best so far.

    Args:
        need: bytes of a micro-batch.
        budget: bytes.
        start: where to look first.

    Returns:
        None where one sample does not fit.
    """
    looked = {start: need(start)}
    if looked[start] > budget and start > 1:
        looked[1] = need(1)
    sides: list[bool] = []
    while len(looked) < MOST_LOOKS:
        fits = max((at for at, needed in looked.items() if needed <= budget), default=0)
        fails = min((at for at, needed in looked.items() if needed > budget), default=MOST + 1)
        if fits == 0 or fails - fits <= max(1, fits // _FINE):
            break
        at = _crossing(looked, budget)
        if fails > MOST:
            at = min(max(at, 2 * fits), _STRIDE * fits)
        elif sides[-2:] in ([True, True], [False, False]):
            at = _middle(fits, fails)
        at = min(max(at, fits + 1), fails - 1)
        looked[at] = need(at)
        sides.append(looked[at] <= budget)
    return max((at for at, needed in looked.items() if needed <= budget), default=None)


def _crossing(looked: dict[int, int], budget: int) -> int:
    """Where the line through the two looks nearest the budget meets it."""
    if len(looked) == 1:
        return 2 * next(iter(looked))
    (one, here), (other, there) = sorted(looked.items(), key=lambda look: abs(look[1] - budget))[:2]
    if here == there:
        return _STRIDE * max(one, other)
    return int(one + (budget - here) * (other - one) / (there - here))


def _middle(fits: int, fails: int) -> int:
    return math.isqrt(fits * fails) if fails > 4 * fits else (fits + fails) // 2
