"""Units: the parts of a model that can be checkpointed, and which of them are worth it.

A unit is a module, by its dotted name ("encoder.layers.3"), a module that keeps the results of its
matrix products and attention and recomputes the rest alone ("encoder.layers.3~"), or a run of
consecutive children of a flat `nn.Sequential` ("features[4:8]" is its children 4 to 7). A unit is
worth checkpointing if that frees a good part of the bytes saved in it. A lone layer frees almost
nothing, because it saves little more than its input, so runs of about sqrt(n) children, and their
halves, are units too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from autofit.errors import InvalidArgument

from .saved_tensors import Call, Timeline

LEAST_SHARE_GIVEN_BACK = 0.25
LEAST_SHARE_OF_ALL = 1 / 5000
SHORTEST_SEQUENTIAL = 4
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

_SEGMENT = re.compile(r"(?P<module>.*)\[(?P<start>\d+):(?P<stop>\d+)\]")


@dataclass(frozen=True)
class Unit:
    """One part of a model.

    Attributes:
        module: dotted name of the module, or of the Sequential that holds the run.
        start, stop: the run of children; both None: the module itself.
        keeps_products: whether the results of matrix products and attention are kept.
    """

    module: str
    start: int | None = None
    stop: int | None = None
    keeps_products: bool = False

    @classmethod
    def parse(cls, name: str) -> Unit:
        """Return the unit that `str` gave this name."""
        match = _SEGMENT.fullmatch(name)
        if match is None:
            return cls(name.removesuffix(KEEPING), keeps_products=name.endswith(KEEPING))
        return cls(match["module"], int(match["start"]), int(match["stop"]))

    @property
    def run(self) -> tuple[int, int] | None:
        """The range of the children in a Sequential; None: the unit is a whole module."""
        return None if self.start is None or self.stop is None else (self.start, self.stop)

    def find(self, model: nn.Module) -> nn.Module:
        """Return the module, or the Sequential that holds the run.

        Raises:
            InvalidArgument: the model has no such module, or it is not a Sequential of that length.
        """
        try:
            found = model.get_submodule(self.module)
        except AttributeError:
            raise InvalidArgument(
                f"the model has no module {self.module!r} to checkpoint: the plan was made for "
                f"another model; search again"
            ) from None
        if self.run is not None and not (
            is_plain_sequential(found) and self.run[1] <= len(found._modules)
        ):
            raise InvalidArgument(
                f"{self.module!r} is not an nn.Sequential with children {self.start} to "
                f"{self.run[1] - 1}: the plan was made for another model; search again"
            )
        return found

    def parts(self, model: nn.Module) -> list[str]:
        """Return the names of the outermost modules that the unit runs, in their order."""
        if self.run is None:
            return [self.module]
        return names_of_children(self.module, self.find(model))[slice(*self.run)]

    def __str__(self) -> str:
        if self.run is None:
            return self.module + KEEPING * self.keeps_products
        return f"{self.module}[{self.start}:{self.stop}]"


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
    runs = [
        call
        for name, module in model.named_modules()
        if is_plain_sequential(module) and name not in closed
        for call in _runs(name, module, timeline, worthy, overwritten)
    ]
    calls = _in_order([*(call for call in modules if call.unit in worthy), *runs])
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
    parsed = Unit.parse(unit)
    parts = map(model.get_submodule, parsed.parts(model))
    makes = (tuple(map(_make_of_module, part.modules())) for part in parts)
    return parsed.keeps_products, *makes


def names_of_children(name: str, module: nn.Module) -> list[str]:
    """Return the dotted names of the children of the module with this name, in their order."""
    # A scripted module has these, and cannot be iterated over
    children = module._modules.keys()
    return [f"{name}.{child}" if name else child for child in children]


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether the module only runs its children one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _make_of_module(module: nn.Module) -> Hashable:
    """Return the key of one module; a parametrized one counts as the class before that."""
    named = module._parameters.items()
    weights = tuple((name, p.shape, p.dtype) for name, p in named if p is not None)
    children = tuple(module._modules.keys())
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


def _runs(
    name: str,
    module: nn.Module,
    timeline: Timeline,
    worthy: Collection[str],
    overwritten: Collection[str],
) -> Iterator[Call]:
    """Yield the calls of about sqrt(n) runs of a flat Sequential's children, and their halves.

    No run begins with a child that changes its input in place.
    """
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
    begins = [child not in overwritten for child in children]
    for start, stop in _nested_cuts(saved, begins):
        if not begins[start]:
            continue
        yield from _calls_of_run(Unit(name, start, stop), children[start:stop], timeline)


def _nested_cuts(saved: Sequence[int], begins: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield runs of the children and the halves of each, every stretch once.

    Args:
        saved: bytes that each child saves.
        begins: whether a run may begin with this child.
    """
    for run in _balanced(saved, begins, range(len(saved)), max(2, isqrt(len(saved)))):
        yield run
        if run[1] - run[0] > 2:
            yield from (half for half in _balanced(saved, begins, range(*run), 2) if half != run)


def _balanced(
    saved: Sequence[int], begins: Sequence[bool], children: range, parts: int
) -> Iterator[tuple[int, int]]:
    """Cut the children into runs that save about the same number of bytes each."""
    whole, so_far, begin = sum(saved[index] for index in children), 0, children.start
    for index in children:
        so_far += saved[index]
        is_last = index + 1 == children.stop
        if is_last or (so_far * parts >= whole and begins[index + 1]):
            if index + 1 - begin > 1:
                yield begin, index + 1
            begin, so_far = index + 1, 0


def _calls_of_run(unit: Unit, parts: Sequence[str], timeline: Timeline) -> Iterator[Call]:
    first, last = timeline.calls_of.get(parts[0], ()), timeline.calls_of.get(parts[-1], ())
    for begin, end in zip(first, last, strict=False):
        yield Call(str(unit), begin.start, end.end, begin.inputs)
