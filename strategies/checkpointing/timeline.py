"""The tensors that a forward pass saves, in order, and the peak that a placement makes of them.

A timeline is a list of storages in the order they were first saved, and of calls of units over
stretches of that list. From it follows what any set of checkpointed units would hold at every
point of the backward pass: the model of a chain (activations pile up in the forward, and are let
go from the end), with units whose activations come back one unit at a time. It orders placements
well and says little about absolute bytes: what a plan needs is measured when it is probed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch


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
        inputs: indices of the storages that it was given.
    """

    unit: str
    start: int
    end: int
    inputs: tuple[int, ...]


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
        return sum(storage.nbytes for storage in self.storages if storage.saved)

    @cached_property
    def end(self) -> int:
        """One past the last position."""
        return 1 + max((storage.last for storage in self.storages), default=-1)

    def released(self, call: Call) -> torch.Tensor:
        """Return indices of the storages that are kept for this call alone, its inputs left out."""
        stretch = self._stretch(call.start, call.end)
        inside = [
            index
            for index in range(stretch.start, stretch.stop)
            if self.storages[index].last < call.end
            and self.storages[index].saved
            and index not in call.inputs
        ]
        return torch.tensor(inside, dtype=torch.int64)

    def gain(self, unit: str) -> int:
        """Return the bytes that training keeps unless it checkpoints this one unit."""
        return sum(self._released_bytes[c] - self._newly_kept(c) for c in self.calls_of[unit])

    def held_until(self, position: int) -> int:
        """Return the bytes that training without checkpointing has saved before this position."""
        index = self._index_of(position)
        return int(self._plain_held[index - 1]) if index else 0

    def bytes_of(self, indices: Collection[int], calls: Collection[Call]) -> int:
        """Return the bytes of those storages that training first saves during these calls."""
        firsts = [storage for index in indices if (storage := self.storages[index]).saved]
        inside = [s for s in firsts if any(call.start <= s.first < call.end for call in calls)]
        return sum(storage.nbytes for storage in inside)

    def most_within(self, start: int, end: int) -> int:
        """Return the most bytes without checkpointing while its backward is at these positions."""
        stretch = self._stretch(start, end)
        held = self._plain_held[stretch] + self._in_flight[stretch]
        return int(held.max()) if len(held) else 0

    def are_apart(self, units: Collection[str]) -> bool:
        """Return whether no call of these units lies within another one of them."""
        calls = [call for call in self.calls if call.unit in units and call.start < call.end]
        return all(one.end <= other.start for one, other in pairwise(calls))

    def peak(self, units: Collection[str]) -> int:
        """Return the most bytes of activations and gradients, with these units checkpointed."""
        if not self.storages:
            return 0
        held, returned = self._saved.clone(), torch.zeros_like(self._bytes)
        calls = [call for unit in units for call in self.calls_of.get(unit, ())]
        for call in calls:
            held[self._released[call]] = 0
        for call in calls:
            held[list(call.inputs)] = 1
            stretch, back = self._returned[call]
            returned[stretch] += back
        return int((torch.cumsum(held * self._bytes, 0) + returned + self._in_flight).max())

    def _newly_kept(self, call: Call) -> int:
        return sum(
            self.storages[index].nbytes for index in call.inputs if not self.storages[index].saved
        )

    def _stretch(self, start: int, end: int) -> slice:
        return slice(self._index_of(start), self._index_of(end))

    def _index_of(self, position: int) -> int:
        return int(torch.searchsorted(self._firsts, position))

    @cached_property
    def _firsts(self) -> torch.Tensor:
        return torch.tensor([storage.first for storage in self.storages], dtype=torch.int64)

    @cached_property
    def _bytes(self) -> torch.Tensor:
        return torch.tensor([storage.nbytes for storage in self.storages], dtype=torch.int64)

    @cached_property
    def _saved(self) -> torch.Tensor:
        return torch.tensor([storage.saved for storage in self.storages], dtype=torch.int64)

    @cached_property
    def _plain_held(self) -> torch.Tensor:
        return torch.cumsum(self._saved * self._bytes, 0)

    @cached_property
    def _in_flight(self) -> torch.Tensor:
        """Bytes of the gradients of what an operator was given and of what it returned.

        What it returned is about as large as what the next operator keeps.
        """
        return self._bytes + torch.cat([self._bytes[1:], self._bytes[-1:]])

    @cached_property
    def _released(self) -> Mapping[Call, torch.Tensor]:
        return {call: self.released(call) for call in self.calls}

    @cached_property
    def _returned(self) -> Mapping[Call, tuple[slice, torch.Tensor]]:
        """Bytes that a call's recomputation has restored, up to each position of its stretch."""
        return {call: self._returned_by(call) for call in self.calls}

    def _returned_by(self, call: Call) -> tuple[slice, torch.Tensor]:
        stretch, released = self._stretch(call.start, call.end), self._released[call]
        back = torch.zeros(stretch.stop - stretch.start, dtype=torch.int64)
        back[released - stretch.start] = self._bytes[released]
        return stretch, torch.cumsum(back, 0)

    @cached_property
    def _released_bytes(self) -> Mapping[Call, int]:
        return {call: int(self._bytes[index].sum()) for call, index in self._released.items()}
