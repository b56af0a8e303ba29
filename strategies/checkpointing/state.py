"""What a training step may leave behind in a model, beside it, and in the random states.

`State` puts a model back to where it was, so that two steps can start alike. `traces` says what a
step left: gradients, parameters, buffers, whatever Python can see in the modules, random states.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .arguments import is_helper, is_the_users
from .contents import CONTAINERS, contents, has_the_same, refill, tensors_in
from .rewind import ABSENT, NUMPY, PYTHON, generator_access

_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

ATTRIBUTE = "attribute "
"""What the names of traces in modules' attributes begin with."""

MANY = 4096
"""Members of a container beside the model; of larger ones (a data set) the length alone is seen."""

_OF_TORCH = frozenset(nn.Module().__dict__)


class State:
    """Parameters, buffers, attributes of all modules, what lies beside them, the random states.

    Beside them are the attributes of their classes, and the globals of the files of these.
    Parameters are kept on the host, so that a large model needs no second copy on its device.
    """

    def __init__(self, model: nn.Module, *, with_parameters: bool = True) -> None:
        self._model = model
        parameters = model.parameters() if with_parameters else ()
        self._parameters = [(p, checksum(p), p.detach().to("cpu", copy=True)) for p in parameters]
        self._attributes = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
        self._beside = [(put, kept) for _, kept, put in _beside(model)]
        in_modules = [v for _, attributes, _ in self._attributes for v in attributes.values()]
        beside = [value for _, kept in self._beside for value in kept.values()]
        found = [c for value in in_modules for c in contents(value)]
        found += [c for value in beside for c in contents(value, most=MANY)]
        self._contents = {id(container): (container, then) for container, then in found}
        held = [tensor for value in in_modules for tensor in tensors_in(value)]
        known = set(map(id, model.parameters()))
        tensors = {id(t): t for t in (*model.buffers(), *held) if id(t) not in known}
        self._buffers = {name: (t, t.detach().clone()) for name, t in tensors.items()}
        self._generators = [
            (access, access[0]()) for value in in_modules if (access := generator_access(value))
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
        for container, then in self._contents.values():
            refill(container, then)
        for buffer, values in self._buffers.values():
            buffer.data.copy_(values)
        for (_, set_state), state in self._generators:
            set_state(state)
        self._model.zero_grad(set_to_none=True)
        for parameter, sum_before, values in self._parameters:
            if checksum(parameter) != sum_before:
                parameter.data.copy_(values)
        _set_random_states(self._random)

    def changed_buffers(self) -> set[str]:
        """Dotted names of all buffers of those modules of which one is not what it was.

        The others may be changed now and then, such as every tenth step.
        """
        before = {id(module): buffers for module, _, buffers in self._attributes}
        changed = set()
        for path, module in self._model.named_modules():
            kept = before.get(id(module), {})
            same = [
                self._is_same(buffer, kept.get(name)) for name, buffer in module._buffers.items()
            ]
            if not all(same):
                changed |= {f"{path}.{name}".lstrip(".") for name in module._buffers}
        return changed

    def changed_attributes(self) -> dict[str, Any]:
        """Dotted names of the attributes that are not what they were, and what they are."""
        before = {id(module): attributes for module, attributes, _ in self._attributes}
        return {
            f"{path}.{name}".lstrip("."): value
            for path, module in self._model.named_modules()
            for name in {**vars(module), **before.get(id(module), {})}
            if not _is_ours_or_torchs(name)
            and not self._is_as_before(
                value := vars(module).get(name, ABSENT),
                before.get(id(module), {}).get(name, ABSENT),
            )
        }

    def _is_as_before(self, value: Any, old: Any) -> bool:
        if value is not old and not (isinstance(value, _PLAIN) and value == old):
            return False
        if not all(self._is_same(tensor, tensor) for tensor in tensors_in(value)):
            return False
        return not generator_access(value) and all(
            has_the_same(*self._contents.get(id(container), (container, container)))
            for container, _ in contents(value)
        )

    def _is_same(self, tensor: torch.Tensor | None, old: torch.Tensor | None) -> bool:
        """Whether a tensor has the values that an old one (which may be the same) had."""
        kept = self._buffers.get(id(old))
        return _same(tensor, kept[1] if kept else old)


def seed_everything(seed: int) -> None:
    """Start torch's, Python's and (where it is loaded) numpy's generators from a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def moved_since(seed: int) -> set[str]:
    """Which of Python's and numpy's generators are not where this seed puts them; they go there."""
    now = _random_states()
    seed_everything(seed)
    then = _random_states()
    return {name for name in (PYTHON, NUMPY) if now.get(name) != then.get(name)}


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
            if not _is_ours_or_torchs(name):
                yield from _visible(ATTRIBUTE + f"{path}.{name}".lstrip("."), value)
    for where, kept, _ in _beside(model):
        for name, value in kept.items():
            yield from _visible(f"{where}{name}", value, MANY)
    yield from _random_states().items()


def _visible(name: str, value: Any, most: float = inf) -> Iterator[tuple[str, Any]]:
    """What compares in a plain value, a container, a generator, or a helper object."""
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, CONTAINERS):
        yield f"{name} (its length)", len(value)
        if len(value) <= most:
            yield f"{name} (its values)", _plain_values(value)
    elif isinstance(value, torch.Tensor):
        yield name, value.detach().clone()
    elif access := generator_access(value):
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
        if not name.startswith("__") and isinstance(value, (*_PLAIN, *CONTAINERS))
    }


def _is_ours_or_torchs(attribute: str) -> bool:
    return attribute in _OF_TORCH or attribute.startswith("_autofit_") or attribute == "forward"


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(torch.eq(one, other).all())


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch's random state": torch.get_rng_state(),
        PYTHON: random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        states["CUDA's random state"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states[NUMPY] = (name, tuple(keys.tolist()), *rest)
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch's random state"])
    random.setstate(states[PYTHON])
    if "CUDA's random state" in states:
        torch.cuda.set_rng_state(states["CUDA's random state"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and NUMPY in states:
        numpy.random.set_state(states[NUMPY])
