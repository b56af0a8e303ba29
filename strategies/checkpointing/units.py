"""Units: the parts of a model that can be checkpointed, and which of them are worth it.

A unit is a module, by its dotted name ("encoder.layers.3"), or a module that keeps the results of
its matrix products and attention and recomputes the rest alone ("encoder.layers.3~"). A unit is
worth checkpointing if that frees a good part of the bytes saved in it. A lone layer frees almost
nothing, because it saves little more than its input.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from autofit.errors import InvalidArgument

from .saved_tensors import Call, Timeline

LEAST_SHARE_GIVEN_BACK = 0.25
LEAST_SHARE_OF_ALL = 1 / 5000
MOST_UNITS = 1000
# Ends the name of a unit that keeps the results of its products.
KEEPING = "~"
# What a unit that keeps its products must free, against such units within it, to replace them: a
# unit of many blocks frees hardly more than its blocks, and takes all of it back at once.
MORE_THAN_WITHIN = 1.1

CHECKPOINTS_ITSELF = (
    "its own code already checkpoints a part of it; to compare placements, "
    "turn that off (in transformers: model.gradient_checkpointing_disable()) "
    "and search again"
)

OVERWRITTEN = "an input is modified in place, so nothing can be recomputed from it"


def module_of(unit: str) -> str:
    """Return the name of a unit's module."""
    return unit.removesuffix(KEEPING)


def keeps_products(unit: str) -> bool:
    """Return whether a unit keeps the results of its matrix products and attention."""
    return unit.endswith(KEEPING)


def find(unit: str, model: nn.Module) -> nn.Module:
    """Return the module of a unit.

    Raises:
        InvalidArgument: the model has no such module.
    """
    try:
        return model.get_submodule(module_of(unit))
    except AttributeError:
        raise InvalidArgument(
            f"the model has no module {module_of(unit)!r} to checkpoint: the plan was made for "
            "another model, or by another version; search again"
        ) from None


@dataclass(frozen=True)
class Candidates:
    """The units of a model that are worth checkpointing.

    Attributes:
        timeline: of one forward pass, its calls those of the units.
        left_out: module -> reason for the report why it is not a candidate.
    """

    timeline: Timeline
    left_out: dict[str, str]

    @property
    def units(self) -> tuple[str, ...]:
        """Names in the order of the forward pass, outer ones first."""
        return tuple(self.timeline.calls_of)


def find_candidates(
    model: nn.Module,
    timeline: Timeline,
    checkpointing: Collection[str] = (),
    around_checkpoints: Collection[str] = (),
    overwritten: Collection[str] = (),
) -> Candidates:
    """Find the units of a model that are worth checkpointing.

    Args:
        timeline: of the calls of all modules, with the bytes that grow with the samples.
        checkpointing: modules whose own code checkpoints something.
        around_checkpoints: these and all modules that run them.
        overwritten: modules of which an input is changed in place.
    """
    left_out = dict.fromkeys(_outermost(sorted(checkpointing)), CHECKPOINTS_ITSELF)
    closed = {*around_checkpoints, *_cannot_be_covered(model)}
    modules = [call for call in timeline.calls if call.unit and call.unit not in closed]
    worthy = _worthy(Timeline(timeline.storages, modules))
    unusable = sorted(worthy.intersection(overwritten))
    worthy.difference_update(unusable)
    blocks = [name for name in unusable if model.get_submodule(name)._modules]
    left_out |= dict.fromkeys(_outermost(blocks), OVERWRITTEN)
    calls = _in_order(call for call in modules if call.unit in worthy)
    best = _best(Timeline(timeline.storages, calls))
    keeping = _keeping_products(Timeline(timeline.storages, modules), worthy)
    return Candidates(replace(best, calls=_in_order([*best.calls, *keeping])), left_out)


def _in_order(calls: Iterable[Call]) -> list[Call]:
    return sorted(calls, key=lambda call: (call.start, -call.end, call.unit))


def _keeping_products(timeline: Timeline, worthy: Collection[str]) -> list[Call]:
    """Return the calls of worthy units as they keep their products; none lies within another."""
    calls = [
        replace(call, unit=call.unit + KEEPING, inputs=(*call.inputs, *call.products))
        for call in timeline.calls
        if call.unit in worthy and len(call.products) > 1
    ]
    keeping = Timeline(timeline.storages, calls)
    candidates, chosen = _worthy(keeping), dict[str, int]()
    for unit in sorted(candidates, key=lambda unit: _length(keeping.calls_of[unit])):
        first = keeping.calls_of[unit][0]
        within = [
            name
            for name in chosen
            if first.start <= (other := keeping.calls_of[name][0]).start and other.end <= first.end
        ]
        if keeping.gain(unit) > MORE_THAN_WITHIN * sum(chosen[name] for name in within):
            chosen = {name: gain for name, gain in chosen.items() if name not in within}
            chosen[unit] = keeping.gain(unit)
    return [call for call in calls if call.unit in chosen]


def _length(calls: Sequence[Call]) -> int:
    return calls[0].end - calls[0].start


def _outermost(names: Collection[str]) -> list[str]:
    return [n for n in names if not any(n.startswith(f"{outer}.") for outer in names)]


def layers(timeline: Timeline) -> list[list[str]]:
    """Return all units in a few lists, each without nested ones; outermost units first."""
    found: list[list[str]] = []
    ends: list[int] = []
    for unit, calls in timeline.calls_of.items():
        depth = next((d for d, end in enumerate(ends) if end <= calls[0].start), len(ends))
        if depth == len(ends):
            found.append([])
            ends.append(0)
        found[depth].append(unit)
        ends[depth] = max(call.end for call in calls)
    return found


def make_of(unit: str, model: nn.Module) -> Hashable:
    """Return a key that is equal for units of the same modules with weights of the same shapes."""
    return keeps_products(unit), *map(_make_of_module, find(unit, model).modules())


def _make_of_module(module: nn.Module) -> Hashable:
    """Return the key of one module; a parametrized one counts as the class before that."""
    named = module._parameters.items()
    weights = tuple((name, p.shape, p.dtype) for name, p in named if p is not None)
    children = tuple(module._modules)
    return type_before_parametrizations(module), children, weights, module.extra_repr()


def _worthy(timeline: Timeline) -> set[str]:
    return {
        unit
        for unit, calls in timeline.calls_of.items()
        if timeline.gain(unit)
        > max(
            LEAST_SHARE_GIVEN_BACK * _saved_in(timeline, calls),
            LEAST_SHARE_OF_ALL * timeline.saved_bytes,
        )
    }


def _saved_in(timeline: Timeline, calls: Sequence[Call]) -> int:
    return sum(timeline.held_until(call.end) - timeline.held_until(call.start) for call in calls)


def _best(timeline: Timeline) -> Timeline:
    """Return the worthy units, one for each stretch; the largest where they are too many."""
    stretches: set[tuple[tuple[int, int], ...]] = set()
    kept: list[str] = []
    worthy = _worthy(timeline)
    for unit, calls in timeline.calls_of.items():
        stretch = tuple((call.start, call.end) for call in calls)
        if unit in worthy and stretch not in stretches:
            stretches.add(stretch)
            kept.append(unit)
    return timeline.of(set(sorted(kept, key=timeline.gain, reverse=True)[:MOST_UNITS]))


def _cannot_be_covered(model: nn.Module) -> Iterator[str]:
    """Yield the modules whose `forward` is compiled away, and all within them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
            yield from (f"{name}.{inner}".strip(".") for inner, _ in module.named_modules())
