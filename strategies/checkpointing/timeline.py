"""What a forward pass saves, which units run over it, and what a placement of them would hold.

A timeline is a list of storages in the order they were first saved, and of calls of units over
spans of that list. From it follows what any set of checkpointed units would hold at every point of
the backward pass: the model of a chain (activations pile up in the forward, and are let go from the
end), with units whose activations come back one unit at a time. It orders placements well and says
little about absolute bytes: what a plan needs is measured when it is probed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Storage:
    """Memory kept for the backward pass.

    Attributes:
        nbytes: its size.
        first, last: when it was saved first and last, as positions among all savings; equal
            positions with `saved` False mark memory that only a checkpointed unit would keep.
        saved: whether training without checkpointing keeps it.
    """

    nbytes: int
    first: int
    last: int
    saved: bool = True


@dataclass(frozen=True)
class Call:
    """One run of a unit.

    Attributes:
        unit: its name.
        start, end: the savings made during the call, as a half-open range of positions.
        inputs: indices of the storages that are kept where it is checkpointed: what it was given.
        products: those that its matrix products and attention made.
    """

    unit: str
    start: int
    end: int
    inputs: tuple[int, ...]
    products: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """The savings of one forward pass and the calls of units in it.

    Attributes:
        storages: sorted by `first`.
        calls: of every unit, in the order they began, outer ones first.
    """

    storages: Sequence[Storage]
    calls: Sequence[Call]

    def of(self, units: Collection[str]) -> Timeline:
        """Return the same savings with the calls of these units alone."""
        return replace(self, calls=[call for call in self.calls if call.unit in units])

    @cached_property
    def calls_of(self) -> Mapping[str, Sequence[Call]]:
        """Unit -> its calls, units in the order of their first calls."""
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.unit, []).append(call)
        return found

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that training without checkpointing keeps for the backward pass."""
        return self.saved_before(self.end)

    @property
    def end(self) -> int:
        """One past the last position."""
        return 1 + max((storage.last for storage in self.storages), default=-1)

    def gain(self, unit: str) -> int:
        """Return the bytes that training keeps unless it checkpoints this one unit."""
        return self._gains[unit]

    def saved_before(self, position: int) -> int:
        """Return the bytes that training without checkpointing has saved before this position."""
        return self._held[self._index_of(position)]

    def saved_in(self, unit: str) -> int:
        """Return the bytes that training without checkpointing first saves in calls of the unit."""
        calls = self.calls_of[unit]
        return sum(self.saved_before(call.end) - self.saved_before(call.start) for call in calls)

    def most_within(self, start: int, end: int) -> int:
        """Return the most bytes without checkpointing while its backward is at these positions."""
        span = self._span(start, end)
        return max((self._held[index + 1] + self._in_flight[index] for index in span), default=0)

    def are_apart(self, units: Collection[str]) -> bool:
        """Return whether no call of these units lies within another one of them."""
        calls = [call for call in self.calls if call.unit in units and call.start < call.end]
        return all(one.end <= other.start for one, other in pairwise(calls))

    def peak(self, units: Collection[str]) -> int:
        """Return the most bytes of activations and gradients, with these units checkpointed."""
        calls = [call for unit in units for call in self.calls_of.get(unit, ())]
        released = {index for call in calls for index in self._released[call]}
        kept = {index for call in calls for index in call.inputs}
        # Beside what is held: what recomputation has brought back, and gradients
        beside = list(self._in_flight)
        for call in calls:
            back = 0
            for index in self._span(call.start, call.end):
                back += self.storages[index].nbytes * (index in self._released[call])
                beside[index] += back
        held = accumulate(
            storage.nbytes * (index in kept or (storage.saved and index not in released))
            for index, storage in enumerate(self.storages)
        )
        return max(map(sum, zip(held, beside, strict=True)), default=0)

    def _span(self, start: int, end: int) -> range:
        """Return the indices of the storages that are first saved at these positions."""
        return range(self._index_of(start), self._index_of(end))

    def _index_of(self, position: int) -> int:
        return bisect_left(self.storages, position, key=lambda storage: storage.first)

    @cached_property
    def _held(self) -> Sequence[int]:
        """Bytes held without checkpointing before each storage is saved, and after the last one."""
        return list(accumulate((s.nbytes * s.saved for s in self.storages), initial=0))

    @cached_property
    def _in_flight(self) -> Sequence[int]:
        """Bytes of the gradients of what an operator was given and of what it returned.

        What it returned is about as large as what the next operator keeps.
        """
        nbytes = [storage.nbytes for storage in self.storages]
        return [one + other for one, other in pairwise([*nbytes, *nbytes[-1:]])]

    @cached_property
    def _released(self) -> Mapping[Call, Collection[int]]:
        """Storages that are kept for one call only, without its inputs."""
        return {call: self._released_by(call) for call in self.calls}

    def _released_by(self, call: Call) -> Collection[int]:
        inside = {i for i in self._span(call.start, call.end) if self.storages[i].last < call.end}
        return {index for index in inside - {*call.inputs} if self.storages[index].saved}

    @cached_property
    def _gains(self) -> Mapping[str, int]:
        return {unit: self._gain(calls) for unit, calls in self.calls_of.items()}

    def _gain(self, calls: Sequence[Call]) -> int:
        released = (index for call in calls for index in self._released[call])
        given = (index for call in calls for index in call.inputs)
        newly_kept = sum(s.nbytes for i in given if not (s := self.storages[i]).saved)
        return sum(self.storages[index].nbytes for index in released) - newly_kept
