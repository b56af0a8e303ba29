"""What a step shows of how its model would compile: operators, and blocks that repeat.

Blocks are of one kind where their class, their parts and the shapes of their parameters are the
same: code that is compiled for one of them serves all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autofit.strategy import TrainingView, calls_watched

from .calls import Operators, run_step

_PLAIN = (
    torch.Tensor,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
)


@dataclass
class SeenStep:
    """What a step shows.

    Attributes:
        calls_model: whether the model was called as a whole.
        operators: how many ran in forward, loss and backward.
        blocks: the names of the blocks that repeat and were called, kind by kind.
        share_of_blocks: of the operators of the model's forward, the share in one block of each
            kind: what there is to compile where blocks are compiled alone.
        objects: the classes of what other blocks are given beside tensors and plain values, such as
            a cache of keys and values. Each call may find it changed, so that code for one block
            does not serve the next one, and they are left out.
    """

    calls_model: bool = False
    operators: int = 0
    blocks: list[list[str]] = field(default_factory=list)
    share_of_blocks: float = 0.0
    objects: list[str] = field(default_factory=list)


def observe(training: TrainingView, batch: Any) -> SeenStep:
    """Return what a step over the batch shows; the weights stay as they are."""
    model = training.model
    kinds = dict(_repeated(model))
    names = {model.get_submodule(name): name for name in kinds}
    count = _Count()
    note = calls_watched(model, [model, *names], count.enter, count.leave)
    with Operators(count.add), note:
        run_step(training, batch)
    blocks_of_kind: dict[Hashable, list[nn.Module]] = {}
    for module, name in names.items():
        if module in count.of_calls and not count.objects.get(module):
            blocks_of_kind.setdefault(kinds[name], []).append(module)
    repeated = [blocks for blocks in blocks_of_kind.values() if len(blocks) > 1]
    of_blocks = sum(count.of_calls[blocks[0]] for blocks in repeated)
    return SeenStep(
        calls_model=model in count.of_calls,
        operators=count.operators,
        blocks=[[names[block] for block in blocks] for blocks in repeated],
        share_of_blocks=of_blocks / max(1, count.of_calls[model]),
        objects=sorted(set().union(*map(count.objects.__getitem__, names))),
    )


def _repeated(module: nn.Module, path: str = "") -> Iterator[tuple[str, Hashable]]:
    """Yield the outermost blocks that have siblings like them: their names and kinds."""
    children = {f"{path}.{name}".lstrip("."): child for name, child in module.named_children()}
    kinds = {name: _kind(child) for name, child in children.items()}
    counts = Counter(kinds.values())
    for name, child in children.items():
        if counts[kinds[name]] > 1 and any(child.children()):
            yield name, kinds[name]
        else:
            yield from _repeated(child, name)


def _objects(value: Any) -> Iterator[str]:
    """Yield the classes of what is neither a tensor nor a plain value nor a container of such."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, tuple | list):
        for each in value:
            yield from _objects(each)
    elif not isinstance(value, _PLAIN):
        yield type(value).__name__


def _kind(module: nn.Module) -> Hashable:
    parts = tuple((name, type(part)) for name, part in module.named_modules())
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return parts, tuple((name, each.shape, each.dtype) for name, each in tensors)


class _Count:
    """Counts the operators that run, and those of the first call of each module.

    Attributes:
        operators: all.
        of_calls: module -> those of its first call.
        objects: module -> the classes of the objects that it was given.
    """

    def __init__(self) -> None:
        self.operators = 0
        self.of_calls: Counter[nn.Module] = Counter()
        self.objects: defaultdict[nn.Module, set[str]] = defaultdict(set)
        self._begun: list[tuple[nn.Module, int]] = []

    def add(self, operator: Any, args: Any) -> None:
        self.operators += 1

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a call of a module."""
        self.objects[module].update(_objects((args, kwargs)))
        self._begun.append((module, self.operators))

    def leave(self, module: nn.Module, output: Any) -> None:
        """End the last call that began."""
        _, before = self._begun.pop()
        if module not in self.of_calls:
            self.of_calls[module] = self.operators - before
