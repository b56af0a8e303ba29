"""From surveys of a model to the levels of the dimension: what each checkpoints, costs and saves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autofit.plan import Dimension, Hint, Scalar

from .candidates import restricted
from .frontier import Placement, frontier, thinned
from .patch import owner_of
from .survey import Survey
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
    seconds = {unit: large.survey.seconds_of(unit, model) for unit in units}
    timeline = restricted(model, large.survey.timeline, units)
    placements = thinned(frontier(timeline, seconds))
    slopes = [_bytes_per_sample(model, placement, small, large) for placement in placements]
    payloads: dict[Scalar, Any] = {}
    hints: dict[Scalar, Hint] = {}
    for level, (placement, slope) in enumerate(zip(placements, slopes, strict=True)):
        step_s = large.survey.step_s
        hints[level] = Hint(
            bytes_per_sample=slope / slopes[0] if slopes[0] > 0 else None,
            seconds_per_sample=(step_s + placement.recompute_s) / step_s if step_s > 0 else None,
        )
        if placement.units:
            payloads[level] = {
                "units": list(placement.units),
                "buffers": _within(buffers, placement.units, model),
            }
    return Dimension(range(len(placements)), payloads=payloads, hints=hints)


def _bytes_per_sample(
    model: nn.Module, placement: Placement, small: Measured, large: Measured
) -> float:
    if large is small:
        return placement.peak_bytes / large.micro_batch
    fewer = restricted(model, small.survey.timeline, placement.units).peak(placement.units)
    return (placement.peak_bytes - fewer) / (large.micro_batch - small.micro_batch)


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
