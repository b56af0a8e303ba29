"""Where the driver places segments, which decides what the caching allocator takes of equal blocks.

A rule found in recorded trainings of an H200, and that of the emulated GPU (its addresses.cpp):
addresses never used before are given downwards, freed ones again from the lowest up; those of the
small pool lie above all others and are given upwards.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Addresses:
    """The addresses of one pool's segments.

    Args:
        first: the address below which, or from which on, new ones are given.
        upwards: whether they are given from there on.
    """

    def __init__(self, first: int, *, upwards: bool) -> None:
        self._lowest = self._highest = first
        self._upwards = upwards
        self._gaps: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """Return the address of a new segment of that many bytes."""
        for at, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[at : at + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        if self._upwards:
            self._highest += size
            return self._highest - size
        self._lowest -= size
        return self._lowest

    def give_back(self, begin: int, size: int) -> None:
        """Take back the address of a segment."""
        end = begin + size
        at = bisect_left(self._gaps, (begin, end))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end = self._gaps.pop(at)[1]
        if at and self._gaps[at - 1][1] == begin:
            begin = self._gaps.pop(at - 1)[0]
        insort(self._gaps, (begin, end))
