"""Replays of recorded allocations: what a training would hold, and the least it can run in.

Neither peak says what a training requires. The real allocator flushes its cache before it gives
up, so less than peak reserved is often enough, while fragmentation keeps it from getting by with
peak allocated. `required_bytes` therefore runs the recorded events again under lower and lower
limits: required is the smallest under which the last steps flush nothing; warm-up may flush.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from autofit.memory.allocator import CachingAllocator, OutOfBudget
from autofit.memory.blocks import OWN_SEGMENT_ROUNDING_BYTES, ROUNDING_BYTES, Block, round_up

Event: TypeAlias = tuple[int, int]
"""(id, bytes) for an allocation, ids being whole numbers from 1, and (-id, 0) for its release."""

STEPS = 4
CALM_STEPS = 2
_FALL = 0.02
_CALM_LIMITS = 3


@dataclass(frozen=True)
class Recording:
    """The allocations of a training that was built and then stepped.

    Attributes:
        events: in the order in which they happened.
        step_ends: for each recorded optimizer step, how many events had happened at its end.
        optional: allocations that code can do without, by id, and what they are for. Where one is
            refused, whatever it is for goes without from then on: so PyTorch treats the
            workspaces of convolution algorithms.
    """

    events: Sequence[Event]
    step_ends: Sequence[int]
    optional: Mapping[int, Hashable] = field(default_factory=dict)

    def steps(self, count: int) -> Iterator[Sequence[Event]]:
        """The events of `count` steps, those of building among the first's.

        Where fewer were recorded, the last one is repeated: what it released of the memory that
        earlier steps had left is, in a repetition, taken from what the step before it left.
        """
        start = 0
        for end in self.step_ends[:count]:
            yield self.events[start:end]
            start = end
        if count > len(self.step_ends):
            yield from self._repetitions(count - len(self.step_ends))

    @property
    def largest_number(self) -> int:
        """The largest id; repeated steps count on from it."""
        return max((event for event, _ in self.events), default=0)

    def _repetitions(self, count: int) -> Iterator[Sequence[Event]]:
        start = self.step_ends[-2] if len(self.step_ends) > 1 else 0
        last = self.events[start : self.step_ends[-1]]
        born = {event: size for event, size in last if event > 0}
        dead = {-event for event, _ in last if event < 0}
        survivors = [event for event in born if event not in dead]
        sizes = dict(event for event in self.events[:start] if event[0] > 0)
        heirs = _pair_by_size(
            [(event, sizes[event]) for event in dead if event not in born],
            [(event, born[event]) for event in survivors],
        )
        shift = self.largest_number
        for turn in range(1, count + 1):
            renumbered = (_renumbered(event, born, heirs, turn, shift) for event in last)
            yield [event for event in renumbered if event is not None]


@dataclass(frozen=True)
class Replay:
    """What one replay held, and how often it had to flush.

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
    run = _Run(allocator, recording) if recording.optional else None
    live: dict[int, Block] = {}
    retries = []
    for events in recording.steps(STEPS):
        if run is None:
            _run(allocator, live, events)
        else:
            run.step(events)
        retries.append(allocator.retries)
    return Replay(
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        retries[-1] - retries[-1 - CALM_STEPS],
        retries[-1] - retries[-2],
    )


def required_bytes(
    recording: Recording, *, expandable_segments: bool = False, resolution: float = 0.002
) -> int:
    """The smallest limit under which four steps run, the last two of them without a flush.

    A smaller limit can work by chance where a larger one does not, since a flush at another moment
    leaves other segments behind. So the limit falls from where nothing is flushed, by 2 % at a
    time, and is bisected between the last that worked and the first that did not. Limits under
    which only the warm-up took a step longer are passed through, if three below them work; not
    where convolutions would go without workspaces, whose sizes are no better known than that.

    Args:
        recording: the allocations.
        expandable_segments: whether the process asks for them.
        resolution: how closely to bisect, as a share of the limit; never under 2 MiB.
    """
    works = replay(recording, expandable_segments=expandable_segments).peak_reserved_bytes
    fails = lowest = _indispensable_bytes(recording) - 1
    limit, doubted = works, 0
    while limit > lowest + 1:
        limit = max(limit - max(int(limit * _FALL), OWN_SEGMENT_ROUNDING_BYTES), lowest + 1)
        held = _held(recording, limit, expandable_segments)
        if held is not None and not held.late_retries:
            limit, doubted = held.peak_reserved_bytes, max(doubted - 1, 0)
            works, fails = (works, fails) if doubted else (limit, lowest)
            continue
        fails, doubted = max(fails, limit), _CALM_LIMITS
        if held is None or held.last_retries or recording.optional:
            break
    while works - fails > max(OWN_SEGMENT_ROUNDING_BYTES, works * resolution):
        limit = (works + fails) // 2
        held = _held(recording, limit, expandable_segments)
        if held is None or held.late_retries:
            fails = limit
        else:
            works = held.peak_reserved_bytes
    return works


def _held(recording: Recording, limit_bytes: int, expandable: bool) -> Replay | None:
    """What a replay under the limit held; None where it ran out."""
    try:
        return replay(recording, limit_bytes=limit_bytes, expandable_segments=expandable)
    except OutOfBudget:
        return None


def _run(allocator: CachingAllocator, live: dict[int, Block], events: Sequence[Event]) -> None:
    allocate, free = allocator.allocate, allocator.free
    for event, size in events:
        if event > 0:
            live[event] = allocate(size)
        else:
            free(live.pop(-event))


class _Run:
    """A run of a recording with optional allocations, and what it has learned to do without."""

    def __init__(self, allocator: CachingAllocator, recording: Recording) -> None:
        self._allocator = allocator
        self._optional = recording.optional
        self._shift = recording.largest_number
        self._live: dict[int, Block] = {}
        self._given_up: set[Hashable] = set()

    def step(self, events: Sequence[Event]) -> None:
        for event, size in events:
            if event > 0:
                self._allocate(event, size)
            elif -event in self._live:
                self._allocator.free(self._live.pop(-event))

    def _allocate(self, number: int, size: int) -> None:
        purpose = self._optional.get((number - 1) % self._shift + 1)
        if purpose is not None and purpose in self._given_up:
            return
        try:
            self._live[number] = self._allocator.allocate(size)
        except OutOfBudget:
            if purpose is None:
                raise
            self._given_up.add(purpose)


def _indispensable_bytes(recording: Recording) -> int:
    """The most bytes in live blocks if nothing optional is allocated."""
    live: dict[int, int] = {}
    held = most = 0
    for event, size in recording.events[: recording.step_ends[-1]]:
        if event < 0:
            held -= live.pop(-event, 0)
        elif event not in recording.optional:
            live[event] = round_up(size, ROUNDING_BYTES)
            held += live[event]
            most = max(most, held)
    return most


def _renumbered(
    event: Event, born: dict[int, int], heirs: dict[int, int], turn: int, shift: int
) -> Event | None:
    number = abs(event[0])
    if number in born:
        number += turn * shift
    elif number in heirs:
        number = heirs[number] + (turn - 1) * shift
    else:
        # Released for good in the recorded step: there is nothing left to release again.
        return None
    return (number if event[0] > 0 else -number), event[1]


def _pair_by_size(gone: list[Event], left: list[Event]) -> dict[int, int]:
    """Each released id -> an id of the same size that was left in its place."""
    pairs = {}
    waiting: dict[int, list[int]] = {}
    for number, size in reversed(left):
        waiting.setdefault(size, []).append(number)
    for number, size in sorted(gone):
        if waiting.get(size):
            pairs[number] = waiting[size].pop()
    return pairs
