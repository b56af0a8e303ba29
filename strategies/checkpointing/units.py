"""Units: the parts of a model that can be checkpointed, and which of them are worth it.

A unit is a module, by its dotted name ("encoder.layers.3"), a module that keeps the results of its
matrix products and attention and recomputes the rest alone ("encoder.layers.3~"), or a segment of
consecutive children of a flat `nn.Sequential` ("features[4:8]" is its children 4 to 7). A unit is
worth checkpointing if that frees a good part of the bytes saved in it. A lone layer frees almost
nothing, because it saves little more than its input, so segments of about sqrt(n) children, and
their halves, are units too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations as class_of

from autofit.errors import InvalidArgument

from .saved_tensors import Recording
from .timeline import Call, Timeline

# What a unit must free of the bytes that are saved in it, and of all that are saved.
MIN_SHARE_OF_ITS_OWN = 0.25
MIN_SHARE_OF_ALL = 1 / 5000
MIN_CHILDREN = 4  # of a Sequential that is cut into segments
MAX_UNITS = 1000
# Ends the name of a unit that keeps the results of its products.
KEEPING = "~"
# What a unit that keeps its products must free, against such units within it, to replace them: a
# unit of many blocks frees hardly more than its blocks, and takes all of it back at once.
MIN_GAIN_OVER_INNER = 1.1

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
        module: dotted name of the module, or of the Sequential that has the segment.
        segment: the range of children; None: the module itself.
        keeps_products: whether the results of matrix products and attention are kept.
    """

    module: str
    segment: tuple[int, int] | None = None
    keeps_products: bool = False

    @classmethod
    def parse(cls, name: str) -> Unit:
        """Return the unit that `str` gave this name."""
        match = _SEGMENT.fullmatch(name)
        if match is None:
            return cls(name.removesuffix(KEEPING), keeps_products=name.endswith(KEEPING))
        return cls(match["module"], (int(match["start"]), int(match["stop"])))

    def find(self, model: nn.Module) -> nn.Module:
        """Return the module, or the Sequential that has the segment.

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
        if self.segment is None:
            return found
        start, stop = self.segment
        if not is_plain_sequential(found) or stop > len(found._modules):
            raise InvalidArgument(
                f"{self.module!r} is not an nn.Sequential with children {start} to "
                f"{stop - 1}: the plan was made for another model; search again"
            )
        return found

    def modules(self, model: nn.Module) -> list[str]:
        """Return the names of the outermost modules that the unit runs, in their order."""
        if self.segment is None:
            return [self.module]
        return names_of_children(self.module, self.find(model))[slice(*self.segment)]

    def __str__(self) -> str:
        if self.segment is None:
            return self.module + KEEPING * self.keeps_products
        return "{}[{}:{}]".format(self.module, *self.segment)


def find_candidates(model: nn.Module, recording: Recording) -> tuple[Timeline, dict[str, str]]:
    """Find the units of a model that are worth checkpointing.

    Args:
        model: holds the modules.
        recording: of one forward pass, with the bytes that grow with the samples.

    Returns:
        The timeline with the calls of the units; modules that are none -> why, for the report.
    """
    timeline, overwritten = recording.timeline, recording.overwritten
    closed = {*recording.around_checkpoints, *_cannot_be_covered(model)}
    modules = timeline.of(timeline.calls_of.keys() - closed - {""})
    worthy = _worthy(modules)
    unusable = sorted(worthy.intersection(overwritten))
    worthy.difference_update(unusable)
    blocks = [name for name in unusable if model.get_submodule(name)._modules]
    left_out = dict.fromkeys(_outermost(recording.checkpointing), CHECKPOINTS_ITSELF)
    left_out |= dict.fromkeys(_outermost(blocks), OVERWRITTEN)
    segments = [
        call
        for name, module in model.named_modules()
        if is_plain_sequential(module) and name not in closed
        for call in _segments(name, module, timeline, worthy, overwritten)
    ]
    best = _best(_with_calls(timeline, [*modules.of(worthy).calls, *segments]))
    keeping = _keeping_products(modules.of(worthy))
    return _with_calls(timeline, [*best.calls, *keeping.calls]), left_out


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
    """Return a key that is equal for units of the same classes with weights of the same shapes."""
    parsed = Unit.parse(unit)
    outermost = map(model.get_submodule, parsed.modules(model))
    inner = (module for each in outermost for module in each.modules())
    return parsed.keeps_products, *((class_of(m), *_shapes(m._parameters)) for m in inner)


def _shapes(weights: Mapping[str, torch.Tensor | None]) -> list[Hashable]:
    return [(name, w.shape, w.dtype) for name, w in weights.items() if w is not None]


def names_of_children(name: str, module: nn.Module) -> list[str]:
    """Return the dotted names of the children of the module with this name, in their order."""
    # A scripted module has these, and cannot be iterated over
    children = module._modules.keys()
    return [f"{name}.{child}" if name else child for child in children]


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether the module only runs its children one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _with_calls(timeline: Timeline, calls: Iterable[Call]) -> Timeline:
    in_order = sorted(calls, key=lambda call: (call.start, -call.end, call.unit))
    return replace(timeline, calls=in_order)


def _outermost(names: Collection[str]) -> list[str]:
    return sorted(n for n in names if not any(n.startswith(f"{outer}.") for outer in names))


def _cannot_be_covered(model: nn.Module) -> Iterator[str]:
    """Yield the modules whose `forward` is compiled away, and all within them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
            yield from (f"{name}.{inner}".strip(".") for inner, _ in module.named_modules())


def _worthy(timeline: Timeline) -> set[str]:
    of_all = MIN_SHARE_OF_ALL * timeline.saved_bytes
    return {
        unit
        for unit in timeline.calls_of
        if timeline.gain(unit) > max(MIN_SHARE_OF_ITS_OWN * timeline.saved_in(unit), of_all)
    }


def _best(timeline: Timeline) -> Timeline:
    """Return the worthy units, one for each span; the largest where they are too many."""
    worthy = _worthy(timeline)
    spans: dict[Hashable, str] = {}
    for unit, calls in timeline.calls_of.items():
        if unit in worthy:
            spans.setdefault(tuple((call.start, call.end) for call in calls), unit)
    largest = sorted(spans.values(), key=timeline.gain, reverse=True)
    return timeline.of(set(largest[:MAX_UNITS]))


def _keeping_products(timeline: Timeline) -> Timeline:
    """Return the calls of units as they keep their products; none lies within another one."""
    keeping = replace(
        timeline,
        calls=[
            replace(call, unit=call.unit + KEEPING, inputs=(*call.inputs, *call.products))
            for call in timeline.calls
            if len(call.products) > 1
        ],
    )
    worthy = _worthy(keeping)
    first = {unit: calls[0] for unit, calls in keeping.calls_of.items() if unit in worthy}
    chosen = set[str]()
    for unit, call in sorted(first.items(), key=lambda item: item[1].end - item[1].start):
        inner = {o for o in chosen if call.start <= first[o].start and first[o].end <= call.end}
        if keeping.gain(unit) > MIN_GAIN_OVER_INNER * sum(map(keeping.gain, inner)):
            chosen = chosen - inner | {unit}
    return keeping.of(chosen)


def _segments(
    name: str,
    module: nn.Module,
    timeline: Timeline,
    worthy: Collection[str],
    overwritten: Collection[str],
) -> Iterator[Call]:
    """Yield the calls of about sqrt(n) segments of a flat Sequential, and of their halves.

    No segment begins with a child that changes its input in place.
    """
    children = names_of_children(name, module)
    is_flat = 2 * sum(child in worthy for child in children) <= len(children)
    calls = timeline.calls_of.get(name, ())
    calls_of_children = [timeline.calls_of.get(child, ()) for child in children]
    if len(children) < MIN_CHILDREN or not is_flat or not calls:
        return
    if any(len(each) != len(calls) for each in calls_of_children):
        return  # a child that also runs elsewhere, or one module standing twice in the list
    # What the Sequential is given stays, whichever segment it is in
    given = [timeline.storages[index] for index in {i for call in calls for i in call.inputs}]
    saved = [
        timeline.saved_in(child)
        - sum(s.nbytes for s in given if s.saved and any(c.start <= s.first < c.end for c in own))
        for child, own in zip(children, calls_of_children, strict=True)
    ]
    begins = [child not in overwritten for child in children]
    for start, stop in _nested_cuts(saved, begins):
        unit = str(Unit(name, (start, stop)))
        for begin, end in zip(calls_of_children[start], calls_of_children[stop - 1], strict=True):
            yield Call(unit, begin.start, end.end, begin.inputs)


def _nested_cuts(saved: Sequence[int], begins: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield ranges of the children and the halves of each, each once.

    Args:
        saved: bytes that each child saves.
        begins: whether a range may begin with this child.
    """
    for whole in _balanced(saved, begins, range(len(saved)), max(2, isqrt(len(saved)))):
        halves = _balanced(saved, begins, range(*whole), 2) if whole[1] - whole[0] > 2 else ()
        yield from (cut for cut in dict.fromkeys((whole, *halves)) if begins[cut[0]])


def _balanced(
    saved: Sequence[int], begins: Sequence[bool], children: range, count: int
) -> Iterator[tuple[int, int]]:
    """Cut the children into this many ranges that save about the same number of bytes each."""
    whole = sum(saved[index] for index in children)
    start, so_far = children.start, 0
    for stop in range(children.start + 1, children.stop + 1):
        so_far += saved[stop - 1]
        if stop == children.stop or (so_far * count >= whole and begins[stop]):
            if stop - start > 1:
                yield start, stop
            start, so_far = stop, 0
