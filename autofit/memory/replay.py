"""Replays of recorded allocations: the peaks of a training, and the smallest limit it runs in.

Neither peak tells what a training requires. The real allocator flushes its cache before it gives
up, so less than peak reserved is often enough; fragmentation makes it need more than peak
allocated. `required_bytes` therefore replays the recorded events under lower and lower limits: the
smallest under which the last steps do not flush, while warm-up may.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from autofit.memory.allocator import (
    OWN_SEGMENT_ROUNDING_BYTES,
    Block,
    CachingAllocator,
    OutOfBudget,
)

# (id, bytes) for an allocation, with ids from 1, and (-id, 0) for its release.
Event: TypeAlias = tuple[int, int]

STEPS = 4
# The last of them, which must not flush.
STEADY_STEPS = 2
_DECREASE = 0.02
_CONFIRMING_LIMITS = 3


@dataclass(frozen=True)
class Recording:
    """The allocations of building a training and of its first optimizer steps.

    Attributes:
        events: allocations and releases in order; those of no bytes hold nothing.
        step_ends: for each recorded optimizer step, the number of events at its end.
        optional: purposes of dispensable allocations, by id. Once one is refused, its purpose goes
            without from then on, as PyTorch treats the workspaces of convolution algorithms.
        uses_cudnn: whether it holds workspaces of cuDNN whose sizes are not documented: those of
            convolutions and recurrent layers.
    """

    events: Sequence[Event]
    step_ends: Sequence[int]
    optional: Mapping[int, Hashable] = field(default_factory=dict)
    uses_cudnn: bool = False

    @cached_property
    def replayed(self) -> list[Sequence[Event]]:
        """The events of each of four steps; the first includes those of building.

        Where fewer were recorded, the last one is repeated: memory that it released of earlier
        steps is, in a repetition, released of the step before.
        """
        ends = self.step_ends[:STEPS]
        recorded = [self.events[start:end] for start, end in pairwise((0, *ends))]
        return [*recorded, *self._repetitions(STEPS - len(ends))]

    @cached_property
    def largest_number(self) -> int:
        """The largest id; ids of repeated steps continue from it."""
        return max((event for event, _ in self.events), default=0)

    def _repetitions(self, count: int) -> Iterator[Sequence[Event]]:
        start = self.step_ends[-2] if len(self.step_ends) > 1 else 0
        last = self.events[start : self.step_ends[-1]]
        allocated = {event: size for event, size in last if event > 0}
        freed = {-event for event, _ in last if event < 0}
        live_at_end = [event for event in allocated if event not in freed]
        sizes = dict(event for event in self.events[:start] if event[0] > 0)
        successors = _pair_by_size(
            [(event, sizes[event]) for event in freed if event not in allocated],
            [(event, allocated[event]) for event in live_at_end],
        )
        shift = self.largest_number
        for turn in range(1, count + 1):
            renumbered = (_renumbered(event, allocated, successors, turn, shift) for event in last)
            yield [event for event in renumbered if event is not None]


@dataclass(frozen=True)
class Replay:
    """The peaks of one replay, and how often it flushed the cache.

    Attributes:
        peak_allocated_bytes: most bytes in live blocks.
        peak_reserved_bytes: most bytes in segments.
        late_retries: flushes in the last two steps.
        last_retries: those in the last step.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    late_retries: int
    last_retries: int


def replay(
    recording: Recording, *, limit_bytes: int | None = None, expandable_segments: bool = False
) -> Replay:
    """Run a recording for four steps under a limit.

    Raises:
        OutOfBudget: the limit is too small for it.
    """
    allocator = CachingAllocator(limit_bytes=limit_bytes, expandable_segments=expandable_segments)
    player, retries = _Player(recording, allocator), []
    for events in recording.replayed:
        player.play(events)
        retries.append(allocator.retries)
    return Replay(
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        retries[-1] - retries[-1 - STEADY_STEPS],
        retries[-1] - retries[-2],
    )


class _Player:
    """Allocates and releases what a recording did."""

    def __init__(self, recording: Recording, allocator: CachingAllocator) -> None:
        self._optional, self._recorded = recording.optional, recording.largest_number
        self._allocator = allocator
        self._live: dict[int, Block] = {}
        self._refused: set[Hashable] = set()

    def play(self, events: Sequence[Event]) -> None:
        """Run these events; raises OutOfBudget where the allocator refuses."""
        optional, recorded, live, refused = (
            self._optional, self._recorded, self._live, self._refused
        )  # fmt: skip
        for number, size in events:
            if number < 0:
                if -number in live:  # it was not refused
                    self._allocator.free(live.pop(-number))
                continue
            purpose = optional.get((number - 1) % recorded + 1) if optional else None
            if purpose in refused or not size:
                continue
            try:
                live[number] = self._allocator.allocate(size)
            except OutOfBudget:
                if purpose is None:
                    raise
                refused.add(purpose)


def peak_after(recording: Recording, *, expandable_segments: bool = False) -> int:
    """Return the peak reserved bytes of what follows a recording's last step.

    The cache is released in between, as `autofit.probing.measure.evaluation_peak` does.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    player, end = _Player(recording, allocator), recording.step_ends[-1]
    player.play(recording.events[:end])
    allocator.empty_cache()
    allocator.reset_peaks()
    player.play(recording.events[end:])
    return allocator.peak_reserved_bytes


def required_bytes(
    recording: Recording, *, expandable_segments: bool = False, resolution: float = 0.002
) -> int:
    """Return the smallest limit under which four steps run, the last two without a flush.

    A smaller limit can work by chance where a larger one does not, since a flush at another moment
    leaves other segments behind. So the limit is lowered by 2% at a time from where nothing is
    flushed, and bisected between the last that worked and the first that did not. A limit under
    which only the warm-up took a step longer is passed if three below it work, but not if
    convolutions would go without workspaces, whose sizes are not known well enough.

    Args:
        recording: the allocations.
        expandable_segments: whether the process uses them.
        resolution: of the bisection, as a share of the limit; at least 2 MiB.
    """
    works = replay(recording, expandable_segments=expandable_segments).peak_reserved_bytes
    limit, fails, doubted = works, 0, 0
    while limit > 0:
        limit -= max(int(limit * _DECREASE), OWN_SEGMENT_ROUNDING_BYTES)
        result = _replay_or_none(recording, limit, expandable_segments)
        if result is not None and not result.late_retries:
            limit, doubted = result.peak_reserved_bytes, max(doubted - 1, 0)
            works, fails = (works, fails) if doubted else (limit, 0)
            continue
        fails, doubted = max(fails, limit), _CONFIRMING_LIMITS
        if result is None or result.last_retries or recording.optional:
            break
    while works - fails > max(OWN_SEGMENT_ROUNDING_BYTES, works * resolution):
        limit = (works + fails) // 2
        result = _replay_or_none(recording, limit, expandable_segments)
        if result is None or result.late_retries:
            fails = limit
        else:
            works = result.peak_reserved_bytes
    return works


def _replay_or_none(recording: Recording, limit_bytes: int, expandable: bool) -> Replay | None:
    """Return the replay under a limit; None where it runs out of memory."""
    try:
        return replay(recording, limit_bytes=limit_bytes, expandable_segments=expandable)
    except OutOfBudget:
        return None


def _renumbered(
    event: Event, allocated: dict[int, int], successors: dict[int, int], turn: int, shift: int
) -> Event | None:
    """Return an event as it is in a repetition; None where there is nothing left to release."""
    number = abs(event[0])
    if number in allocated:
        number += turn * shift
    elif number in successors:
        number = successors[number] + (turn - 1) * shift
    else:
        return None
    return (number if event[0] > 0 else -number), event[1]


def _pair_by_size(released: list[Event], remaining: list[Event]) -> dict[int, int]:
    """Return for each released id a remaining id of the same size, if there is one."""
    pairs = {}
    by_size: dict[int, list[int]] = {}
    for number, size in reversed(remaining):
        by_size.setdefault(size, []).append(number)
    for number, size in sorted(released):
        if by_size.get(size):
            pairs[number] = by_size[size].pop()
    return pairs
