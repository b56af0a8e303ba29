"""What a step of an uncompiled model shows of how it would compile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.strategy import TrainingView

# What inductor has several kernels of its own for, less "aten::".
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})


@dataclass
class UncompiledStep:
    """What an uncompiled step shows.

    Attributes:
        calls_model: whether the model was called as a whole.
        operators: how many ran in forward, loss and backward.
        blocks: names of the blocks that repeat and were called.
        operators_of_blocks: those of one block of each kind.
        draws: names of the operators that drew random numbers.
        products: how many products and convolutions ran that differ in their shapes.
    """

    calls_model: bool = False
    operators: int = 0
    blocks: list[str] = field(default_factory=list)
    operators_of_blocks: float = 0.0
    draws: list[str] = field(default_factory=list)
    products: int = 0


def observed(training: TrainingView, batch: Any) -> UncompiledStep:
    """Return what a step over the batch shows; the weights stay as they are."""
    step, watch = UncompiledStep(), _Watch(training.device)
    kinds = dict(_repeated(training.model))
    modules = {name: training.model.get_submodule(name) for name in kinds}
    called: list[str] = []

    def model_called(module: nn.Module, inputs: Any) -> None:
        step.calls_model = True

    def enter(name: str, module: nn.Module, inputs: Any) -> None:
        watch.inside = name
        called.append(name)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        watch.inside = None

    with ExitStack() as stack:
        stack.callback(training.model.register_forward_pre_hook(model_called).remove)
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.callback(training.wrap_optimizer_step(lambda update: None))
        stack.enter_context(watch)
        training.step(batch)
    step.operators, step.draws = watch.operators, sorted(watch.draws)
    step.products = len(watch.products)
    step.blocks = [name for name in kinds if name in called]
    one_of_each = {kinds[name]: name for name in step.blocks}.values()
    share = sum(watch.forward[name] for name in one_of_each) / max(1, watch.forward.total())
    step.operators_of_blocks = share * step.operators
    return step


def _repeated(module: nn.Module, path: str = "") -> Iterator[tuple[str, Hashable]]:
    """Yield the outermost blocks that have siblings like them: their names and kinds."""
    kinds = {
        f"{path}.{name}".lstrip("."): (type(child), _shapes(child))
        for name, child in module.named_children()
    }
    counts = Counter(kinds.values())
    for (name, kind), child in zip(kinds.items(), module.children(), strict=False):
        if counts[kind] > 1 and any(child.children()):
            yield name, kind
        else:
            yield from _repeated(child, name)


def _shapes(module: nn.Module) -> Hashable:
    return tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Counts the operators that run, by block in the forward, and notes which draw at random."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._device = device
        self.operators = 0
        self.forward: Counter[str | None] = Counter()
        self.draws: set[str] = set()
        self.products: set[Hashable] = set()
        self.inside: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        if (name := func._schema.name.removeprefix("aten::")) in _PRODUCTS:
            shapes = (tuple(each.shape) for each in args if isinstance(each, torch.Tensor))
            self.products.add((name, *shapes))
        if torch._C._current_graph_task_id() == -1:  # no backward runs
            self.forward[self.inside] += 1
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = _random_state(self._device)
        result = func(*args, **(kwargs or {}))
        # attention has the tag, and draws nothing where it drops nothing
        if (kwargs or {}).get("generator") or _random_state(self._device) != before:
            self.draws.add(str(func))
        return result


def _random_state(device: torch.device) -> list[int]:
    """Return the state of the device's own generator."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device).tolist()
    return torch.get_rng_state().tolist()
