"""Has chosen units of a live model checkpointed, and takes that back without a trace.

A module's `forward` is covered by a bound method in its instance `__dict__`. So names in the
state dict, types, hooks and parameters stay what they are, a deep copy runs its own weights, the
whole model can be saved, and `torch.compile` sees plain code. The method is called `forward`
because pickle looks a bound method up by that name: a model loaded from a file runs plainly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofit.errors import InvalidRequest

from .state import NUMPY, PYTHON, Rewind, StatePath
from .tensor_tree import put_tensors, take_tensors
from .units import Unit

# Runs a function now, keeps its inputs alone, and runs it again in the backward pass.
#
# This is `torch.utils.checkpoint` in its non-reentrant form, made exact where that one is silently
# not: state that a forward changes (running statistics, moving averages, spectral norm's vectors,
# counts and caches in attributes) is shown to the second run as it was before the first, and is
# left alone by it.


def recomputed(
    function: Callable[..., Any],
    holder: nn.Module,
    state: Sequence[StatePath],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """`function(*args, **kwargs)`, its activations dropped and computed again when needed.

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

    contexts = partial(_contexts, holder, state)
    return checkpoint(run, *tensors, use_reentrant=False, context_fn=contexts)


def _hooks_allowed() -> bool:
    """Whether autograd lets saved tensors be replaced; under `torch.func` it does not."""
    autograd: Any = torch._C._autograd  # torch annotates only part of it
    if autograd._saved_tensors_hooks_is_enabled():
        return True
    warnings.warn(
        "activation checkpointing is off inside torch.func transforms: they do not allow saved "
        "tensors to be recomputed, so this pass keeps all its activations",
        stacklevel=3,
    )
    return False


def _contexts(
    holder: nn.Module, state: Sequence[StatePath]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What the first run and the second run are done under."""
    return nullcontext(), Rewind(holder, state) if state else nullcontext()


_FORWARD = "_autofit_forward"
_RUNS = "_autofit_runs"
_STATE = "_autofit_state"
_ADDED = ("forward", _FORWARD, _RUNS, _STATE)
_ABSENT = object()


@contextmanager
def checkpointed(
    model: nn.Module, units: Iterable[str], state: Collection[str] = ()
) -> Iterator[None]:
    """Recompute these units' activations in the backward pass, for as long as this is entered.

    Args:
        model: changed in place, and given back as it was.
        units: names as `Unit` writes them; no unit may lie within another.
        state: what a forward may change and the second one must find as it was: dotted names of
            buffers and attributes of the model's modules, and random states as `rewind` names them.

    Raises:
        InvalidRequest: the model has no such unit, or another training has it checkpointed.
    """
    patched: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for holder, runs in _by_holder(model, units):
            patched.append((holder, {key: holder.__dict__.get(key, _ABSENT) for key in _ADDED}))
            _cover(holder, runs, _state_below(model, holder, set(state)))
        yield
    finally:
        for holder, before in reversed(patched):
            _uncover(holder, before)


def _by_holder(
    model: nn.Module, units: Iterable[str]
) -> list[tuple[nn.Module, tuple[tuple[int, int], ...]]]:
    """Each module to cover, with the runs of children to checkpoint in it; (): all of it."""
    parsed = [Unit.parse(name) for name in units]
    holders: dict[str, nn.Module] = {unit.module: unit.find(model) for unit in parsed}
    return [
        (holder, tuple(sorted(u.run for u in parsed if u.module == name and u.run is not None)))
        for name, holder in holders.items()
    ]


def _state_below(
    model: nn.Module, holder: nn.Module, names: Collection[str]
) -> tuple[StatePath, ...]:
    """Where this state of the model lies, as seen from a module of it."""
    path_of = {module: path for path, module in holder.named_modules()}
    owners = [(owner_of(model, name), name) for name in sorted(names)]
    below = [(path_of[owner], name) for owner, name in owners if owner in path_of]
    anywhere = [("", name) for owner, name in owners if owner is None]
    return (*((path, name.rpartition(".")[2]) for path, name in below), *anywhere)


def owner_of(model: nn.Module, state: str) -> nn.Module | None:
    """The module that holds this buffer or attribute of the model; None: a random state."""
    return None if state in (PYTHON, NUMPY) else model.get_submodule(state.rpartition(".")[0])


def _cover(holder: nn.Module, runs: Sequence[tuple[int, int]], paths: Any) -> None:
    if _FORWARD in holder.__dict__:
        raise InvalidRequest(
            f"the model's {type(holder).__name__} is checkpointed by another training that has not "
            "ended: leave that first, by its `with` block or its undo()"
        )
    plain = holder.forward
    holder.__dict__[_FORWARD] = plain
    holder.__dict__[_RUNS] = runs
    holder.__dict__[_STATE] = paths
    holder.__dict__["forward"] = MethodType(forward, holder)


def _uncover(holder: nn.Module, before: dict[str, Any]) -> None:
    for key, value in before.items():
        if value is _ABSENT:
            holder.__dict__.pop(key, None)
        else:
            holder.__dict__[key] = value


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a covered module runs."""
    plain, state = self.__dict__[_FORWARD], self.__dict__[_STATE]
    if not self.__dict__[_RUNS]:
        return recomputed(plain, self, state, args, kwargs)
    children = list(self._modules.values())  # children() drops one that stands twice
    value, position = args[0] if args else kwargs["input"], 0
    for start, stop in self.__dict__[_RUNS]:
        value = _in_turn(children[position:start], value)
        value = recomputed(partial(_in_turn, children[start:stop]), self, state, (value,), {})
        position = stop
    return _in_turn(children[position:], value)


def _in_turn(modules: Sequence[Any], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value
