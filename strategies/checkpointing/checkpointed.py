"""Checkpoint chosen units of a live model, exactly, and take that back without a trace.

A module's `forward` is covered by a bound method in its instance `__dict__`. So names in the
state dict, types, hooks and parameters stay what they are, a deep copy runs its own weights, the
whole model can be saved, and `torch.compile` sees plain code. The method is called `forward`
because pickle looks a bound method up by that name: a model loaded from a file runs plainly.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofit.errors import InvalidArgument
from autofit.strategy import NUMPY, PYTHON, attributes_kept

from .products import Products
from .saved_tensors import put_tensors, take_tensors
from .units import Unit

# Dotted name of a module below the one that is run, and its buffer's or a random state's name.
StatePath: TypeAlias = tuple[str, str]

_FORWARD = "_autofit_forward"
_RUNS = "_autofit_runs"
_STATE = "_autofit_state"
_KEEPS = "_autofit_keeps_products"
_AROUND = "_autofit_around"
_ADDED = ("forward", _FORWARD, _RUNS, _STATE, _KEEPS, _AROUND)


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
    with ExitStack() as stack:
        for holder, runs, keeps in _by_holder(model, units):
            stack.enter_context(attributes_kept(holder, *_ADDED))
            below = _state_below(model, holder, set(state))
            _cover(holder, runs, _Around(around), {_STATE: below, _KEEPS: keeps})
        yield


def _by_holder(
    model: nn.Module, units: Iterable[str]
) -> list[tuple[nn.Module, tuple[tuple[int, int], ...], bool]]:
    """Return each module to cover, with the runs of children to checkpoint in it; (): all of it.

    And whether it keeps its products. A module that stands under two names is covered once.

    Raises:
        InvalidArgument: its names ask for different things.
    """
    parsed = [Unit.parse(name) for name in units]
    keeping = {unit.module for unit in parsed if unit.keeps_products}
    first: dict[nn.Module, str] = {}
    covers: dict[nn.Module, tuple[tuple[tuple[int, int], ...], bool]] = {}
    for name, holder in {unit.module: unit.find(model) for unit in parsed}.items():
        runs = tuple(sorted(u.run for u in parsed if u.module == name and u.run is not None))
        cover = runs, name in keeping
        if covers.setdefault(holder, cover) != cover:
            raise InvalidArgument(
                f"{first[holder]!r} and {name!r} name one module, which is checkpointed in one "
                "way wherever it runs: give one of them"
            )
        first.setdefault(holder, name)
    return [(holder, *cover) for holder, cover in covers.items()]


def _state_below(
    model: nn.Module, holder: nn.Module, names: Collection[str]
) -> tuple[StatePath, ...]:
    """Return where this state of the model lies, as seen from a module of it."""
    path_of = {module: path for path, module in holder.named_modules()}
    owners = [(owner_of(model, name), name) for name in sorted(names)]
    below = [(path_of[owner], name) for owner, name in owners if owner in path_of]
    anywhere = [("", name) for owner, name in owners if owner is None]
    return (*((path, name.rpartition(".")[2]) for path, name in below), *anywhere)


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


def _cover(
    holder: nn.Module, runs: Sequence[tuple[int, int]], around: _Around, others: Mapping[str, Any]
) -> None:
    if _FORWARD in holder.__dict__:
        raise InvalidArgument(
            f"the model's {type(holder).__name__} is already checkpointed by another "
            "training: end that one first, by leaving its `with` block or calling its "
            "undo()"
        )
    original = holder.forward
    holder.__dict__[_FORWARD] = original
    holder.__dict__[_RUNS] = runs
    holder.__dict__.update(others)
    holder.__dict__[_AROUND] = around
    holder.__dict__["forward"] = MethodType(forward, holder)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a covered module."""
    original, state = self.__dict__[_FORWARD], self.__dict__[_STATE]
    if not self.__dict__[_RUNS]:
        return recomputed(original, self, state, args, kwargs)
    children: list[Any] = list(self._modules.values())  # children() drops one that stands twice
    value, position = args[0] if args else kwargs["input"], 0
    for start, stop in self.__dict__[_RUNS]:
        for child in children[position:start]:
            value = child(value)
        value = recomputed(partial(_in_turn, children[start:stop]), self, state, (value,), {})
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
    holder: nn.Module,
    state: Sequence[StatePath],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run the function, keep only its inputs, and run it again in the backward pass.

    This is the non-reentrant `torch.utils.checkpoint`, made exact where that is silently not: the
    second run finds buffers (running statistics, moving averages, spectral norm's vectors) and
    random states as the first one did, and leaves the live ones alone.

    Args:
        function: runs `holder`, or a part of it.
        holder: the module below which the state is found.
        state: what a forward may change.
        args, kwargs: tensors may stand at any depth of tuples, lists, dicts and dataclasses.
    """
    if torch.compiler.is_compiling():
        # the compiler makes buffer updates functional by itself, and refuses a context_fn
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    if not torch.is_grad_enabled() or not _hooks_allowed():
        return function(*args, **kwargs)
    tensors, nest = take_tensors((tuple(args), dict(kwargs)))
    live = [(args, kwargs)]

    def run(*tensors: torch.Tensor) -> Any:
        # what the first run does to the caller's objects is seen there; the second run finds them
        # as the first did, and keeps what it does to them to itself
        own_args, own_kwargs = live.pop() if live else put_tensors(nest, tensors)
        return function(*own_args, **own_kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[None]]:
        """Return what the first run is in, and what the second."""
        if not holder.__dict__[_KEEPS]:
            return nullcontext(), _Again(holder, state)
        products = Products()
        return products.first(), _Again(holder, state, products.again)

    marks = _marks_of_devices(holder, tensors)
    return checkpoint(run, *tensors, *marks, use_reentrant=False, context_fn=contexts)


def _marks_of_devices(holder: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an empty tensor on each device that the holder draws on and no argument lies on.

    torch keeps the random states of the devices of the arguments.
    """
    used = {tensor.device for tensor in (*holder.parameters(), *holder.buffers())}
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


class _Around:
    """What is entered around recomputations; a model that is loaded from a file has nothing.

    A copy of the model shares it: the training that it belongs to is not copied along.
    """

    def __init__(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        self.enter = enter

    def __deepcopy__(self, memo: object) -> _Around:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Around, (nullcontext,)


class _Again:
    """Shows state as it is when this is made; the live state comes back after.

    Each recomputation enters it, and what is to be entered around one.
    """

    def __init__(
        self,
        holder: nn.Module,
        state: Sequence[StatePath],
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._around: _Around = holder.__dict__[_AROUND]
        self._within = within
        self._entered = ExitStack()
        self._places = [_place(holder, *path) for path in state]
        self._then = _cloned([get() for get, _ in self._places])
        self._live: list[Any] = []

    def __enter__(self) -> None:
        self._live = [get() for get, _ in self._places]
        self._show(_cloned(self._then))  # a second backward needs `then` once more
        self._entered.enter_context(self._around.enter())
        self._entered.enter_context(self._within())

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
        self._show(self._live)
        self._live = []

    def _show(self, values: Sequence[Any]) -> None:
        for (_, put), value in zip(self._places, values, strict=True):
            put(value)


def _place(
    holder: nn.Module, module: str, name: str
) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how to get and set a buffer or a random state."""
    if name == PYTHON:
        return random.getstate, random.setstate
    if name == NUMPY:
        numpy = sys.modules["numpy"].random
        return numpy.get_state, numpy.set_state
    buffers = holder.get_submodule(module)._buffers
    return partial(buffers.get, name), partial(buffers.__setitem__, name)


def _cloned(values: Sequence[Any]) -> list[Any]:
    """Return tensors of their own; a buffer with two names keeps both."""
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
    clones = {
        key: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for key, tensor in tensors.items()
    }
    return [clones.get(id(value), value) for value in values]
