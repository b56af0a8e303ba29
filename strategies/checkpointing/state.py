"""What a training step may leave behind in a model, beside it, and in the random states.

`State` puts a model back to where it was, so that two steps can start alike. `traces` says what a
step left: gradients, parameters, buffers, whatever Python can see in the modules, random states.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .arguments import is_helper, is_the_users

_CONTAINERS = (list, dict, set, deque, OrderedDict)
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_OF_TORCH = frozenset(nn.Module().__dict__)


class State:
    """Parameters, buffers, attributes of all modules, what lies beside them, the random states.

    Beside them are the attributes of their classes, and the globals of the files of these.
    Parameters are kept on the host, so that a large model needs no second copy on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [
            (p, checksum(p), p.detach().to("cpu", copy=True)) for p in model.parameters()
        ]
        self._attributes = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
        self._beside = [(put, kept) for _, kept, put in _beside(model)]
        in_modules = [v for _, attributes, _ in self._attributes for v in attributes.values()]
        beside = [value for _, kept in self._beside for value in kept.values()]
        held = [value for value in in_modules if isinstance(value, torch.Tensor)]
        self._buffers = [(b, b.detach().clone()) for b in (*model.buffers(), *held)]
        self._contents = [c for value in (*in_modules, *beside) for c in _contents(value)]
        self._generators = [
            (access, access[0]()) for value in in_modules if (access := _generator_access(value))
        ]
        self._random = _random_states()

    def restore(self) -> None:
        """Put the model and the random states back, and drop the gradients."""
        for module, attributes, _ in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for put, kept in self._beside:
            for name, value in kept.items():
                put(name, value)
        for container, contents in self._contents:
            _refill(container, contents)
        for buffer, values in self._buffers:
            buffer.data.copy_(values)
        for (_, set_state), state in self._generators:
            set_state(state)
        for parameter, sum_before, values in self._parameters:
            parameter.grad = None
            if checksum(parameter) != sum_before:
                parameter.data.copy_(values)
        _set_random_states(self._random)

    def changed_buffers(self) -> set[str]:
        """Dotted names of the buffers that are not what they were."""
        before = {id(buffer): values for buffer, values in self._buffers}
        kept = {
            (id(module), name): buffer
            for module, _, buffers in self._attributes
            for name, buffer in buffers.items()
        }
        changed = set()
        for path, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                old = kept.get((id(module), name))
                values = before.get(id(old)) if old is not None else None
                if not _same(buffer, values):
                    changed.add(f"{path}.{name}" if path else name)
        return changed


def seed_everything(seed: int) -> None:
    """Start torch's, Python's and (where it is loaded) numpy's generators from a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def checksum(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bits, read as whole numbers; it says whether values were changed."""
    width = _WHOLE_NUMBERS[min(tensor.element_size(), 8)]
    bits = tensor.detach().contiguous().reshape(-1).view(width)
    return int(bits.sum(dtype=torch.int64))


def traces(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a step left behind, as names for a reader and values that compare.

    Gradients are not among them: they are dropped at the end of a step, and are taken before.
    """
    yield from ((f"parameter {name}", checksum(p)) for name, p in model.named_parameters())
    yield from ((f"buffer {name}", b.detach().clone()) for name, b in model.named_buffers())
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in _OF_TORCH and not name.startswith("_autofit_") and name != "forward":
                yield from _visible(f"attribute {path}.{name}" if path else name, value)
    for where, kept, _ in _beside(model):
        for name, value in kept.items():
            yield from _visible(f"{where}{name}", value)
    yield from _random_states().items()


def _visible(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What compares in a plain value, a container, a generator, or a helper object."""
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, _CONTAINERS):
        yield f"{name} (its length)", len(value)
        yield f"{name} (its values)", _plain_values(value)
    elif isinstance(value, torch.Tensor):
        yield name, value.detach().clone()
    elif access := _generator_access(value):
        yield f"{name} (its random state)", repr(access[0]())
    elif is_helper(value):
        for key, inner in vars(value).items():
            if isinstance(inner, _PLAIN):
                yield f"{name}.{key}", inner


def _plain_values(container: Any) -> list[Any]:
    """Plain values in a container, those of a dict with their keys; sets compare by length."""
    if isinstance(container, set):
        return []
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, value) for key, value in items if isinstance(value, _PLAIN)]


def _generator_access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to get and set the state of a random number generator; None: it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    bits = getattr(value, "bit_generator", None)  # numpy's, which need not be installed
    if bits is not None and hasattr(bits, "state"):
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


def _classes(model: nn.Module) -> list[type]:
    """Classes of the modules that are not torch's own; a forward may count in them."""
    found = {cls for module in model.modules() for cls in type(module).__mro__}
    return sorted(filter(is_the_users, found), key=lambda cls: cls.__qualname__)


def _beside(
    model: nn.Module,
) -> Iterator[tuple[str, dict[str, Any], Callable[[str, Any], None]]]:
    """Where a forward may count outside of its module: its name, what is in it, how to put it."""
    classes = _classes(model)
    for cls in classes:
        yield f"class attribute {cls.__name__}.", _countable(vars(cls)), partial(setattr, cls)
    methods = (m for cls in classes for m in vars(cls).values() if isinstance(m, FunctionType))
    globals_of = {id(method.__globals__): method.__globals__ for method in methods}
    for names in globals_of.values():
        if str(names.get("__name__")).partition(".")[0] not in sys.stdlib_module_names:
            yield "global ", _countable(names), names.__setitem__


def _countable(namespace: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in namespace.items()
        if not name.startswith("__") and isinstance(value, (*_PLAIN, *_CONTAINERS))
    }


def _contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """A container, or the attributes of a helper object, and a copy of what is in it."""
    if type(value) in _CONTAINERS:
        yield value, copy.copy(value)
    elif is_helper(value):
        yield vars(value), dict(vars(value))


def _refill(container: Any, contents: Any) -> None:
    """In place: hooks and closures may hold the same container."""
    container.clear()
    if hasattr(container, "update"):
        container.update(contents)
    else:
        container.extend(contents)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(torch.eq(one, other).all())


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch's random state": torch.get_rng_state(),
        "Python's random state": random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        states["CUDA's random state"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy's random state"] = (name, tuple(keys.tolist()), *rest)
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch's random state"])
    random.setstate(states["Python's random state"])
    if "CUDA's random state" in states:
        torch.cuda.set_rng_state(states["CUDA's random state"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy's random state" in states:
        numpy.random.set_state(states["numpy's random state"])
