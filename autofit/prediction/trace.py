"""What a training allocates and computes, for any GPU and, between dry runs, any micro-batch.

A dry run asks its GPU few questions; where two GPUs give the same answers, only the sizes that the
GPU decides differ (`ByCard`), and `Trace.recording_on` puts those in. As long as a training makes
the same allocations in the same order, their sizes lie on straight lines in the micro-batch: a part
is fixed, and each sample adds as much. `on_line` draws these lines number for number; where a third
dry run lies on the lines of two others, so does what is between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from autofit.devices.gpus import Gpu
from autofit.memory.replay import Recording
from autofit.prediction.cuda.roofline import Cost, Operation, cost_on
from autofit.prediction.cuda.scratch import Buffer, ByCard, recording_on


@dataclass(frozen=True)
class Trace:
    """The allocations of two optimizer steps, and the work of the second.

    Attributes:
        micro_batch: samples of the first micro-batch of a step.
        micro_batches: how many of a step's micro-batches ran.
        allocations: every allocation and release, in order; see `recording_on`.
        by_card: the allocations whose size the GPU decides, by number.
        work: the operators of the micro-batches.
        update_work: those of the update; part of `work` with the user's own `training_step`.
    """

    micro_batch: int
    micro_batches: int
    allocations: Recording
    by_card: Mapping[int, ByCard]
    work: Sequence[Operation]
    update_work: Sequence[Operation]

    def recording_on(self, gpu: Gpu) -> Recording:
        """Return the allocations on a GPU."""
        return recording_on(gpu, self.allocations, self.by_card)

    def micro_batch_cost_on(self, gpu: Gpu) -> Cost | None:
        """Return the cost of a micro-batch with its share of the update; None: unknown rates."""
        return cost_on(gpu, [*self.work, *self.update_work], self.micro_batches)

    def step_seconds_on(self, gpu: Gpu, repeats: float = 1.0) -> float | None:
        """Return the estimated time of an optimizer step that repeats these micro-batches.

        It is good for ratios between plans of one training alone; None where the rates of the GPU
        are unknown.
        """
        step, update = cost_on(gpu, self.work), cost_on(gpu, self.update_work)
        if step is None or update is None:
            return None
        return max(
            repeats * step.kernel_seconds + update.kernel_seconds,
            repeats * step.launch_seconds + update.launch_seconds,
        )


_Line = Callable[[int, int], int]
_Part = TypeVar("_Part")


class _NotStraight(Exception):
    """Two traces do not differ in sizes alone, or the sizes have no whole number between."""


def on_line(one: Trace, other: Trace, micro_batch: int) -> Trace | None:
    """Return the trace of another micro-batch, with each size on the line through those of two.

    None where the two differ in more than sizes, or a size is no fixed part and a whole number for
    each sample.
    """
    line = partial(_at, one.micro_batch, other.micro_batch, micro_batch)
    sizes = tuple(one.by_card.values()), tuple(other.by_card.values())
    try:
        _same(list(one.by_card), list(other.by_card))
        return Trace(
            micro_batch,
            _same(one.micro_batches, other.micro_batches),
            _recording(one.allocations, other.allocations, line),
            dict(zip(one.by_card, _scratch(*sizes, line), strict=True)),
            _operations(one.work, other.work, line),
            _operations(one.update_work, other.update_work, line),
        )
    except _NotStraight:
        return None


def _at(first: int, last: int, at: int, here: int, there: int) -> int:
    if here == there:
        return here
    if (here * last - there * first) * (last - first) < 0:
        raise _NotStraight  # no samples would take less than nothing, as where sizes are squares
    size, rest = divmod((there - here) * (at - first), last - first)
    if rest:
        raise _NotStraight
    return here + size


def _recording(one: Recording, other: Recording, line: _Line) -> Recording:
    _same(one.step_ends, other.step_ends)
    _same(one.optional, other.optional)
    _same([number for number, _ in one.events], [number for number, _ in other.events])
    events = tuple(
        (number, line(here, there))
        for (number, here), (_, there) in zip(one.events, other.events, strict=True)
    )
    return replace(one, events=events)


def _operations(
    one: Sequence[Operation], other: Sequence[Operation], line: _Line
) -> tuple[Operation, ...]:
    _same(len(one), len(other))
    return tuple(
        Operation(
            _same(here.kind, there.kind),
            line(here.flops, there.flops),
            line(here.traffic_bytes, there.traffic_bytes),
            _scratch(here.scratch, there.scratch, line),
        )
        for here, there in zip(one, other, strict=True)
    )


def _scratch(one: tuple[ByCard, ...], other: tuple[ByCard, ...], line: _Line) -> tuple[ByCard, ...]:
    _same(len(one), len(other))
    return tuple(_sized(here, there, line) for here, there in zip(one, other, strict=True))


def _sized(one: ByCard, other: ByCard | None, line: _Line) -> ByCard:
    if not isinstance(one, Buffer) or not isinstance(other, Buffer) or one == other:
        return _same(one, other)
    here, there = one.reduction, other.reduction
    _same((one.place, len(here.shape)), (other.place, len(there.shape)))
    shape = tuple(map(line, here.shape, there.shape))
    strides = tuple(map(line, here.strides, there.strides))
    _same(replace(here, shape=shape, strides=strides), replace(there, shape=shape, strides=strides))
    return Buffer(replace(here, shape=shape, strides=strides), one.place)


def _same(one: _Part, other: object) -> _Part:
    if one != other:
        raise _NotStraight
    return one
