"""Names of the parts of a model that can be checkpointed.

A unit is a module, by its dotted name ("encoder.layers.3"), or a run of consecutive children of a
flat `nn.Sequential` ("features[4:8]" is its children 4 to 7).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from autofit.errors import InvalidRequest

from .timeline import Call, Timeline

_SEGMENT = re.compile(r"(?P<module>.*)\[(?P<start>\d+):(?P<stop>\d+)\]")


@dataclass(frozen=True)
class Unit:
    """One part of a model.

    Attributes:
        module: dotted name of the module, or of the Sequential that holds the run.
        start, stop: the run of children; both None: the module itself.
    """

    module: str
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, name: str) -> Unit:
        """The unit that `str` named."""
        match = _SEGMENT.fullmatch(name)
        if match is None:
            return cls(name)
        return cls(match["module"], int(match["start"]), int(match["stop"]))

    @property
    def run(self) -> tuple[int, int] | None:
        """The children of a Sequential that the unit is made of; None: a whole module."""
        return None if self.start is None or self.stop is None else (self.start, self.stop)

    def find(self, model: nn.Module) -> nn.Module:
        """The module, or the Sequential that holds the run.

        Raises:
            InvalidRequest: the model has no such module, or it is no Sequential of that length.
        """
        try:
            found = model.get_submodule(self.module)
        except AttributeError:
            raise InvalidRequest(
                f"the model has no module {self.module!r} to checkpoint: the plan was made for "
                f"another model; search again"
            ) from None
        if self.run is not None and not (
            is_plain_sequential(found) and self.run[1] <= len(found._modules)
        ):
            raise InvalidRequest(
                f"{self.module!r} is no nn.Sequential with children {self.start} to "
                f"{self.run[1] - 1}: the plan was made for another model; search again"
            )
        return found

    def parts(self, model: nn.Module) -> list[str]:
        """Names of the modules that the unit runs, outermost ones only, in their order."""
        if self.run is None:
            return [self.module]
        return names_of_children(self.module, self.find(model))[slice(*self.run)]

    def __str__(self) -> str:
        return self.module if self.run is None else f"{self.module}[{self.start}:{self.stop}]"


def make_of(unit: str, model: nn.Module) -> Hashable:
    """Equal for units of one make: alike in all their modules, with weights of the same shapes."""
    parts = map(model.get_submodule, Unit.parse(unit).parts(model))
    return tuple(tuple(map(_make_of_module, part.modules())) for part in parts)


def _make_of_module(module: nn.Module) -> Hashable:
    """Without its children; a parametrized module has a class of its own, which says nothing."""
    named = module._parameters.items()
    weights = tuple((name, p.shape, p.dtype) for name, p in named if p is not None)
    children = tuple(module._modules)
    return type_before_parametrizations(module), children, weights, module.extra_repr()


def names_of_children(name: str, module: nn.Module) -> list[str]:
    """Dotted names of the children of the module with this name, in their order."""
    return [f"{name}.{child}" if name else child for child in module._modules]


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether the module runs its children one after the other, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


# Which parts of a model are worth checkpointing: modules at every level, and runs of children.
#
# A unit is worth it if it gives back a good part of what is saved in it. A lone layer gives back
# next to nothing, for what it saves is what it was given. Where a flat `nn.Sequential` of such
# layers holds the activations, runs of its children are made units: about as many as the square
# root of its length, and their halves.

LEAST_SHARE_GIVEN_BACK = 0.25
LEAST_SHARE_OF_ALL = 1 / 5000
SHORTEST_SEQUENTIAL = 4
MOST_UNITS = 1000

CHECKPOINTS_ITSELF = (
    "its code checkpoints a part of it already; to have placements compared, turn that off (in "
    "transformers: model.gradient_checkpointing_disable()) and search again"
)


@dataclass(frozen=True)
class Candidates:
    """What was found.

    Attributes:
        timeline: of one forward pass, its calls those of the units.
        left_out: module -> why it is no candidate, where a reader should know.
    """

    timeline: Timeline
    left_out: dict[str, str]

    @property
    def units(self) -> tuple[str, ...]:
        """Names in the order of the forward pass, outer ones first."""
        return tuple(self.timeline.calls_of)


def find_candidates(
    model: nn.Module, timeline: Timeline, checkpointed_itself: Collection[str] = ()
) -> Candidates:
    """The units of a model that are worth checkpointing.

    Args:
        timeline: with the calls of all modules, and the bytes that samples bring.
        checkpointed_itself: modules that checkpoint something on their own.
    """
    itself = sorted(name for name in checkpointed_itself if name)
    outermost = [n for n in itself if not any(n.startswith(f"{outer}.") for outer in itself)]
    left_out = dict.fromkeys(outermost, CHECKPOINTS_ITSELF)
    closed = {*checkpointed_itself, *_cannot_be_covered(model)}
    modules = [call for call in timeline.calls if call.unit and call.unit not in closed]
    worthy = _worthy(Timeline(timeline.storages, modules))
    runs = [
        call
        for name, module in model.named_modules()
        if is_plain_sequential(module) and name not in closed
        for call in _runs(name, module, timeline, worthy)
    ]
    calls = sorted(
        [call for call in modules if call.unit in worthy] + runs,
        key=lambda call: (call.start, -call.end, call.unit),
    )
    return Candidates(_best(Timeline(timeline.storages, calls)), left_out)


def layers(timeline: Timeline) -> list[list[str]]:
    """All units in a few lists, each without nested ones; outermost units first."""
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
    """Worthy units alone, one for each stretch, the largest where they are too many."""
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
    """Modules whose `forward` is compiled away, and all within them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
            yield from (f"{name}.{inner}".strip(".") for inner, _ in module.named_modules())


def _runs(
    name: str, module: nn.Module, timeline: Timeline, worthy: Collection[str]
) -> Iterator[Call]:
    """Calls of runs of a flat Sequential's children: about sqrt(n) runs, and halves of them."""
    children = names_of_children(name, module)
    is_flat = 2 * sum(child in worthy for child in children) <= len(children)
    if len(children) < SHORTEST_SEQUENTIAL or not is_flat:
        return
    calls = timeline.calls_of.get(name, ())
    if not calls or any(len(timeline.calls_of.get(c, ())) != len(calls) for c in children):
        return  # a child that also runs elsewhere, or one module standing twice in the list
    given = {index for call in calls for index in call.inputs}  # stays, whichever run it is in
    saved = [
        _saved_in(timeline, timeline.calls_of[child])
        - timeline.bytes_of(given, timeline.calls_of[child])
        for child in children
    ]
    for start, stop in _nested_cuts(saved):
        yield from _calls_of_run(Unit(name, start, stop), children[start:stop], timeline)


def _nested_cuts(saved: Sequence[int]) -> Iterator[tuple[int, int]]:
    for start, stop in _balanced(saved, 0, len(saved), max(2, isqrt(len(saved)))):
        yield start, stop
        if stop - start > 2:
            yield from _balanced(saved, start, stop, 2)


def _balanced(saved: Sequence[int], start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """Cut children start to stop into runs that save about the same number of bytes each."""
    whole, so_far, begin = sum(saved[start:stop]), 0, start
    for index in range(start, stop):
        so_far += saved[index]
        done = stop - index == 1 or so_far * parts >= whole
        if done and index + 1 - begin > 1:
            yield begin, index + 1
        if done:
            begin, so_far = index + 1, 0


def _calls_of_run(unit: Unit, parts: Sequence[str], timeline: Timeline) -> Iterator[Call]:
    first, last = timeline.calls_of.get(parts[0], ()), timeline.calls_of.get(parts[-1], ())
    for begin, end in zip(first, last, strict=False):
        yield Call(str(unit), begin.start, end.end, begin.inputs)
