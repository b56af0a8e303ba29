"""Checkpoint chosen units of a live model, exactly, and take that back without a trace.

A module's `forward` is covered by a bound method in its instance `__dict__`. So names in the
state dict, types, hooks and parameters stay what they are, a deep copy runs its own weights, the
whole model can be saved, and `torch.compile` sees plain code. The method is called `forward`
because pickle looks a bound method up by that name: a model loaded from a file runs plainly.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofit.errors import InvalidArgument
from autofit.strategy import NUMPY, PYTHON, attributes_kept

from .products import Products
from .tensor_tree import put_tensors, take_tensors
from .units import Unit

# The module that holds a buffer, and the buffer's name; None and a random state's name.
StatePlace: TypeAlias = tuple[nn.Module | None, str]

_COVER = "_autofit_checkpointing"


@dataclass(frozen=True)
class Cover:
    """How a module is checkpointed; kept in the module.

    Attributes:
        original: its forward.
        segments: ranges of children of a Sequential that are units of their own; (): all is one.
        keeps_products: whether the results of products are kept.
        state: what a forward may change.
        around: entered around each recomputation.
    """

    original: Callable[..., Any]
    segments: tuple[tuple[int, int], ...]
    keeps_products: bool
    state: tuple[StatePlace, ...]
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def __deepcopy__(self, memo: dict[int, Any]) -> Cover:
        """Return a cover for a copied module, with the same `around`: no training is copied."""
        original, state = copy.deepcopy((self.original, self.state), memo)
        return replace(self, original=original, state=state)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave `around` out: a model that is loaded from a file is in no training."""
        return Cover, (self.original, self.segments, self.keeps_products, self.state)


@contextmanager
def checkpointed(
    model: nn.Module,
    units: Iterable[str],
    state: Collection[str] = (),
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Recompute these units' activations in the backward pass, for as long as this is entered.

    Args:
        model: changed in place, and given back as it was.
        units: names as `Unit` writes them; no unit may lie within another.
        state: what a forward may change and the second one must find as it was: dotted names of
            buffers, "Python's random state", "numpy's random state" (torch's is always kept).
        around: `around()` is entered around each recomputation, as something was around the
            forward (torch's autocast is entered in any case).

    Raises:
        InvalidArgument: the model has no such unit or buffer, or another training has it
            checkpointed.
    """
    places = [(owner_of(model, name), name.rpartition(".")[2]) for name in sorted(set(state))]
    with ExitStack() as stack:
        for module, (segments, keeps_products) in _modules_to_cover(model, units).items():
            if _COVER in vars(module):
                raise InvalidArgument(
                    f"the model's {type(module).__name__} is already checkpointed by another "
                    "training: end that one first, by leaving its `with` block or calling its "
                    "undo()"
                )
            stack.enter_context(attributes_kept(module, "forward", _COVER))
            owners = {None, *module.modules()}
            below = tuple(place for place in places if place[0] in owners)
            cover = Cover(module.forward, segments, keeps_products, below, around)
            vars(module).update({_COVER: cover, "forward": MethodType(forward, module)})
        yield


def _modules_to_cover(
    model: nn.Module, names: Iterable[str]
) -> dict[nn.Module, tuple[tuple[tuple[int, int], ...], bool]]:
    """Return each module to cover, with the segments to checkpoint, and if it keeps its products.

    A module that stands under two names is covered once.

    Raises:
        InvalidArgument: there is no such unit, or the names of a module ask for different things.
    """
    units: dict[str, list[Unit]] = {}
    for unit in map(Unit.parse, names):
        units.setdefault(unit.module, []).append(unit)
    found: dict[nn.Module, tuple[str, Any]] = {}
    for name, each in units.items():
        (module,) = {unit.find(model) for unit in each}
        segments = tuple(sorted(unit.segment for unit in each if unit.segment))
        way = segments, any(unit.keeps_products for unit in each)
        first, first_way = found.setdefault(module, (name, way))
        if first_way != way:
            raise InvalidArgument(
                f"{first!r} and {name!r} name the same module, which can only be "
                "checkpointed in one way: give one of them"
            )
    return {module: way for module, (_, way) in found.items()}


def owner_of(model: nn.Module, state: str) -> nn.Module | None:
    """Return the module that holds this buffer of the model; None for a random state.

    Raises:
        InvalidArgument: the model has no such buffer.
    """
    if state in (PYTHON, NUMPY):
        return None
    path, _, name = state.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        owner = None
    if owner is None or name not in owner._buffers:
        raise InvalidArgument(
            f"the model has no buffer {state!r} to restore before recomputation: the "
            "plan was made for another model or by another version; search again"
        )
    return owner


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a covered module."""
    cover: Cover = vars(self)[_COVER]
    if not cover.segments:
        return recomputed(cover.original, self, args, kwargs)
    children: list[Any] = list(self._modules.values())  # children() drops one that stands twice
    value, position = args[0] if args else kwargs["input"], 0
    for start, stop in cover.segments:
        for child in children[position:start]:
            value = child(value)
        value = recomputed(partial(_in_turn, children[start:stop]), self, (value,), {})
        position = stop
    for child in children[position:]:  # not by a function, beside which `value` would stay alive
        value = child(value)
    return value


def _in_turn(modules: Sequence[Any], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def recomputed(
    function: Callable[..., Any],
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run the function, keep only its inputs, and run it again in the backward pass.

    This is the non-reentrant `torch.utils.checkpoint`, made exact where that is silently not: the
    second run finds buffers (running statistics, moving averages, spectral norm's vectors) and
    random states as the first one did, and leaves the live ones alone.

    Args:
        function: runs `module`, or a part of it.
        module: covered.
        args, kwargs: tensors may stand at any depth of tuples, lists, dicts and dataclasses.
    """
    if torch.compiler.is_compiling():
        # the compiler makes buffer updates functional by itself, and refuses a context_fn
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    if not torch.is_grad_enabled() or not _hooks_allowed():
        return function(*args, **kwargs)
    tensors, nest = take_tensors((tuple(args), dict(kwargs)))
    first = _First(args, kwargs)

    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = first.arguments or put_tensors(nest, tensors)
        return function(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        cover: Cover = vars(module)[_COVER]
        if not cover.keeps_products:
            return first, _Again(cover)
        products = Products()
        first.within = products.first()
        return first, _Again(cover, products.again)

    marks = _marks_of_devices(module, tensors)
    return checkpoint(run, *tensors, *marks, use_reentrant=False, context_fn=contexts)


def _marks_of_devices(module: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an empty tensor on each device that the module draws on and no argument lies on.

    torch keeps the random states of the devices of the arguments.
    """
    used = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        used.add(torch.device("cuda", torch.cuda.current_device()))
    missing = used - {tensor.device for tensor in tensors}
    return [torch.empty(0, device=each) for each in missing if each.type not in ("cpu", "meta")]


def _hooks_allowed() -> bool:
    """Return whether autograd lets saved tensors be replaced; under `torch.func` it does not."""
    autograd: Any = torch._C._autograd  # torch annotates only part of it
    if autograd._saved_tensors_hooks_is_enabled():
        return True
    warnings.warn(
        (
            "activation checkpointing is off inside torch.func transforms, which do "
            "not allow saved tensors to be recomputed: this pass keeps all its "
            "activations"
        ),
        stacklevel=3,
    )
    return False


class _First(AbstractContextManager[None]):
    """What the first run is in: it gets the caller's own arguments.

    What it does to them is seen by the caller. A later run gets copies as they were before, and
    keeps what it does to them to itself.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = args, kwargs
        self.within: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        self.within.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.arguments = None
        self.within.__exit__(*error)


class _Again(AbstractContextManager[None]):
    """What each later run is in: state is as when this was made, and the live state after it.

    Args:
        cover: says which state, and what is entered around.
        within: makes what is entered beside.
    """

    def __init__(
        self, cover: Cover, within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._contexts = cover.around, within
        self._places = [_access(*place) for place in cover.state]
        self._before = _cloned([get() for get, _ in self._places])
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._show, [get() for get, _ in self._places])
            self._show(_cloned(self._before))  # a second backward needs `before` once more
            for context in self._contexts:
                stack.enter_context(context())
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def _show(self, values: Sequence[Any]) -> None:
        for (_, put), value in zip(self._places, values, strict=True):
            put(value)


def _access(owner: nn.Module | None, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how to get and set a buffer, or a random state."""
    if owner is not None:
        return partial(owner._buffers.get, name), partial(owner._buffers.__setitem__, name)
    if name == PYTHON:
        return random.getstate, random.setstate
    numpy = sys.modules["numpy"].random
    return numpy.get_state, numpy.set_state


def _cloned(values: Sequence[Any]) -> list[Any]:
    """Return tensors of their own; a buffer with two names keeps both."""
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
    clones = {
        key: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for key, tensor in tensors.items()
    }
    return [clones.get(id(value), value) for value in values]
