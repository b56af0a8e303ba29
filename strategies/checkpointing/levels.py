"""From surveys of a model to the dimension's levels: what each checkpoints, costs and saves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import nn

from autofit.plan import Dimension, Hint, Scalar

from .candidates import restricted
from .frontier import Placement, frontier, spread, thinned
from .patch import owner_of
from .survey import Survey
from .timeline import Storage, Timeline
from .units import Unit


@dataclass(frozen=True)
class Measured:
    """A survey and the micro-batch at which it was made."""

    micro_batch: int
    survey: Survey


def make_dimension(
    model: nn.Module, units: Sequence[str], buffers: Sequence[str], small: Measured, large: Measured
) -> Dimension:
    """The levels, from none to least memory, with payloads and hints.

    Args:
        units: candidates that train alike when checkpointed.
        buffers: the model's buffers that a forward pass changes.
        small, large: two surveys, so that bytes are a line in the micro-batch; times are those
            of the large one.
    """
    placements = thinned(find_placements(model, units, small, large))
    payloads: dict[Scalar, Any] = {}
    hints: dict[Scalar, Hint] = {}
    for level, placement in enumerate(placements):
        hints[level] = _hint(placement, placements[0], large.survey.step_s)
        if placement.units:
            payloads[level] = {
                "units": list(placement.units),
                "buffers": _within(buffers, placement.units, model),
            }
    return Dimension(range(len(placements)), payloads=payloads, hints=hints)


def find_placements(
    model: nn.Module, units: Sequence[str], small: Measured, large: Measured
) -> list[Placement]:
    """The best placements, too many perhaps to be levels; their bytes are bytes per sample."""
    timeline = restricted(model, _per_sample(small, large), units)
    seconds = {unit: large.survey.seconds_of(unit, model) for unit in units}
    return spread(frontier(timeline, _evened(model, timeline, seconds)))


def _per_sample(small: Measured, large: Measured) -> Timeline:
    """The large survey's timeline with the slope of each storage over the micro-batch."""
    fewer, more = small.survey.timeline, large.survey.timeline
    added = large.micro_batch - small.micro_batch
    if not added or [s.first for s in fewer.storages] != [s.first for s in more.storages]:
        slopes = [storage.nbytes / large.micro_batch for storage in more.storages]
    else:
        pairs = zip(fewer.storages, more.storages, strict=True)
        slopes = [max(0.0, (many.nbytes - few.nbytes) / added) for few, many in pairs]
    storages = [
        Storage(round(slope), storage.first, storage.last, storage.saved)
        for slope, storage in zip(slopes, more.storages, strict=True)
    ]
    return Timeline(storages, more.calls)


def _evened(model: nn.Module, timeline: Timeline, seconds: dict[str, float]) -> dict[str, float]:
    """Units of one make take the same time: that of all of them together, less noisy than each."""
    kinds: dict[Any, list[str]] = {}
    for unit in seconds:
        parts = [model.get_submodule(part) for part in Unit.parse(unit).parts(model)]
        make = tuple((type(part), sum(p.numel() for p in part.parameters())) for part in parts)
        kinds.setdefault((make, timeline.gain(unit)), []).append(unit)
    means = {tuple(alike): fmean(seconds[unit] for unit in alike) for alike in kinds.values()}
    return {unit: mean for alike, mean in means.items() for unit in alike}


def _hint(placement: Placement, plain: Placement, step_s: float) -> Hint:
    return Hint(
        bytes_per_sample=placement.peak_bytes / plain.peak_bytes if plain.peak_bytes else None,
        seconds_per_sample=(step_s + placement.recompute_s) / step_s if step_s > 0 else None,
    )


def _within(buffers: Collection[str], units: Sequence[str], model: nn.Module) -> list[str]:
    """Those of the buffers that lie in a module that one of the units runs."""
    inside = {
        (id(module), name)
        for unit in units
        for part in Unit.parse(unit).parts(model)
        for module in model.get_submodule(part).modules()
        for name in module._buffers
    }
    return [name for name in buffers if owner_of(model, name) in inside]
