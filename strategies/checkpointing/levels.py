"""From looks at a model to the dimension's levels: what each checkpoints, costs and saves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

from torch import nn

from autofit.plan import Dimension, Hint, Scalar

from .frontier import Placement, frontier, spread, thinned
from .patch import owner_of
from .survey import Times
from .timeline import Timeline
from .units import Unit, make_of


def make_dimension(
    model: nn.Module, timeline: Timeline, times: Times, state: Sequence[str]
) -> Dimension:
    """The levels, from none to least memory, with payloads and hints.

    Args:
        timeline: what the samples bring; its units are candidates that train alike when
            checkpointed.
        times: of the parts of the units.
        state: what a forward pass changes, as `checkpointed` takes it.
    """
    placements = thinned(find_placements(model, timeline, times))
    payloads: dict[Scalar, Any] = {}
    hints: dict[Scalar, Hint] = {}
    for level, placement in enumerate(placements):
        hints[level] = _hint(placement, placements[0], times.step_s)
        if placement.units:
            payloads[level] = {
                "units": list(placement.units),
                "state": _within(state, placement.units, model),
            }
    return Dimension(range(len(placements)), payloads=payloads, hints=hints)


def find_placements(model: nn.Module, timeline: Timeline, times: Times) -> list[Placement]:
    """The best placements of a timeline's units, too many perhaps to be levels."""
    seconds = {unit: times.of(unit, model) for unit in timeline.calls_of}
    return spread(frontier(timeline, _evened(model, timeline, seconds)))


def _evened(model: nn.Module, timeline: Timeline, seconds: dict[str, float]) -> dict[str, float]:
    """Units of one make take the same time: that of all of them together, less noisy than each."""
    kinds: dict[Any, list[str]] = {}
    for unit in seconds:
        kinds.setdefault((make_of(unit, model), timeline.gain(unit)), []).append(unit)
    means = {tuple(alike): fmean(seconds[unit] for unit in alike) for alike in kinds.values()}
    return {unit: mean for alike, mean in means.items() for unit in alike}


def _hint(placement: Placement, plain: Placement, step_s: float) -> Hint:
    return Hint(
        bytes_per_sample=placement.peak_bytes / plain.peak_bytes if plain.peak_bytes else None,
        seconds_per_sample=(step_s + placement.recompute_s) / step_s if step_s > 0 else None,
    )


def _within(state: Collection[str], units: Sequence[str], model: nn.Module) -> list[str]:
    """What of the state lies in a module that one of the units runs, or in none."""
    inside = {
        module
        for unit in units
        for part in Unit.parse(unit).parts(model)
        for module in model.get_submodule(part).modules()
    }
    return [name for name in state if owner_of(model, name) in (None, *inside)]
