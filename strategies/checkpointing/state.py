"""What a training step may leave behind in a model, beside it, and in the random states.

`State` puts a model back to where it was, so that two steps can start alike. `traces` says what a
step left: gradients, parameters, buffers, whatever Python can see in the modules, random states.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from .tensor_tree import is_helper, is_the_users, put_tensors, take_tensors

# What is in containers and in objects of the user's own: kept, put back, compared, altered.

CONTAINERS = (list, dict, set, deque, OrderedDict)

DEEPEST = 4
"""Levels of containers and objects within an attribute that are looked into."""


def contents(
    value: Any, depth: int = DEEPEST, known: set[int] | None = None, most: float = inf
) -> Iterator[tuple[Any, Any]]:
    """Containers, and the attributes of helper objects, with a copy of what is in each.

    Those with more members than `most` are passed over.
    """
    known = set() if known is None else known
    if not depth or id(value) in known:
        return
    if type(value) not in CONTAINERS and not is_helper(value):
        return
    known.add(id(value))
    held = vars(value) if is_helper(value) else value
    if len(held) > most:
        return
    yield held, copy.copy(held)
    for inner in list(held.values() if isinstance(held, dict) else held):
        yield from contents(inner, depth - 1, known, most)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The value, if it is a tensor, or the tensors in such containers and objects."""
    if isinstance(value, torch.Tensor):
        yield value
    for _, kept in contents(value):
        inner = kept.values() if isinstance(kept, dict) else kept
        yield from (each for each in inner if isinstance(each, torch.Tensor))


def refill(container: Any, then: Any) -> None:
    """In place: hooks and closures may hold the same container."""
    container.clear()
    if hasattr(container, "update"):
        container.update(then)
    else:
        container.extend(then)


def has_the_same(container: Any, then: Any) -> bool:
    """The very same things in it, in their order; values need not compare."""
    if isinstance(container, dict):
        same_keys = list(container) == list(then)
        return same_keys and has_the_same(list(container.values()), list(then.values()))
    return len(container) == len(then) and all(
        one is other for one, other in zip(container, then, strict=True)
    )


def has_tensors(value: Any) -> bool:
    """Whether there are tensors in an attribute's value, at any depth."""
    return bool(take_tensors(value)[0])


def altered(value: Any) -> Any:
    """A copy of such a value whose tensors are others, of the same shapes and types."""
    tensors, nest = take_tensors(value)
    plain = [tensor.detach() for tensor in tensors]
    return put_tensors(nest, tuple(~t if t.dtype == torch.bool else t + 1 for t in plain))


# Shows the second run of a unit what the first one found, and leaves what is live alone.
#
# What is shown has a name: a buffer or an attribute of a module its dotted one, the random states
# of Python and numpy (torch's are kept by torch) those below.

StatePath = tuple[str, str]
"""Dotted name of a module below the one that is run, and its buffer's or attribute's name."""

PYTHON, NUMPY = "Python's random state", "numpy's random state"

ABSENT = object()
"""In place of an attribute that is not there."""


class Rewind:
    """Shows state below a module as it is when this is made; the live one comes back after."""

    def __init__(self, holder: nn.Module, paths: Sequence[StatePath]) -> None:
        self._places = [_place(holder, *path) for path in paths]
        self._then = _copied([place.get() for place in self._places])
        self._live: list[Any] = []

    def __enter__(self) -> None:
        self._live = [place.get() for place in self._places]
        self._show(_copied(self._then))  # a second backward needs `then` once more

    def __exit__(self, *error: object) -> None:
        self._show(self._live)
        self._live = []

    def _show(self, values: Sequence[Any]) -> None:
        for place, value in zip(self._places, values, strict=True):
            place.put(value)


def generator_access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to get and set the state of a random number generator; None: it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    bits = getattr(value, "bit_generator", None)  # numpy's, which need not be installed
    if bits is not None and hasattr(bits, "state"):
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


class _Place(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _place(holder: nn.Module, module: str, name: str) -> _Place:
    if name == PYTHON:
        return _of_generator(random.getstate, random.setstate)
    if name == NUMPY:
        numpy = sys.modules["numpy"]
        return _of_generator(numpy.random.get_state, numpy.random.set_state)
    owner = holder.get_submodule(module)
    kept: dict[str, Any] = owner._buffers if name in owner._buffers else vars(owner)
    if access := generator_access(kept.get(name)):
        return _of_generator(*access)
    return _Place(partial(kept.get, name, ABSENT), partial(_put, kept, name))


def _of_generator(get: Callable[[], Any], put: Callable[[Any], Any]) -> _Place:
    """Its state in a function: what has no copy is not looked into."""
    return _Place(lambda: partial(_itself, get()), lambda state: put(state()))


def _itself(value: Any) -> Any:
    return value


def _put(kept: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        kept.pop(name, None)
    else:
        kept[name] = value


def _copied(values: Sequence[Any]) -> list[Any]:
    """Containers, objects and tensors of their own; what several of them share, they share anew."""
    tensors, nest = take_tensors(list(values))
    copies = {id(tensor): _clone(tensor) for tensor in tensors}
    copied: list[Any] = put_tensors(nest, tuple(copies[id(tensor)] for tensor in tensors))
    return copied


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


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
