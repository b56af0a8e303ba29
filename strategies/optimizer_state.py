"""The state of torch's Adam, AdamW and SGD in bfloat16, where the parameters are in float32.

Each parameter is stepped alone: its state is cast to float32, the optimizer's own step runs, and
what it left is rounded to bfloat16, so that the state of one parameter is all that is ever held in
float32. It is rounded up or down at random, by as much as it lies between: to the nearest, a second
moment that changes by a thousandth in each step would stay where it is.

The optimizer keeps its object, hyperparameters and schedulers. A state dict that it gives meanwhile
has bfloat16 in it; `load_state_dict` takes either type, with these settings and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from autofit.errors import Unsupported
from autofit.strategy import TrainingView

from .update_in_backward import is_dense

_KNOWN = (SGD, Adam, AdamW)
_LOW_BITS = 16
"""Of the 32 of a float, those that bfloat16 lacks."""


@contextmanager
def state_in_bfloat16(*optimizers: Optimizer) -> Iterator[None]:
    """Keep the state of optimizers in bfloat16 from the next step on, while this is entered.

    Raises:
        Unsupported: one is none of torch's own, whose step may go through all parameters itself.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if type(optimizer) not in _KNOWN:
                raise Unsupported(
                    "optimizer.state=bfloat16 steps each parameter alone, as torch's SGD, Adam and "
                    f"AdamW do, but the optimizer is a {type(optimizer).__name__}: use one of "
                    "these, or search again with this one"
                )
            stack.enter_context(_one_in_bfloat16(optimizer))
        yield


@contextmanager
def _one_in_bfloat16(optimizer: Optimizer) -> Iterator[None]:
    device = optimizer.param_groups[0]["params"][0].device
    generator = None if device.type == "meta" else torch.Generator(device)

    def before(_: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Step each parameter alone; other hooks see the optimizer as it is.

        A hook, and no other `step`: whoever holds that already calls it.
        """
        return (_OneByOne(optimizer, generator), *args[1:]), kwargs

    hook = optimizer.register_step_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
        for parameter in list(optimizer.state):
            _widen(optimizer, parameter)


@dataclass(frozen=True)
class _OneByOne:
    """An optimizer as its own step sees it: with a group for each gradient.

    Attributes:
        optimizer: what all else is taken from.
        generator: of the random numbers that state is rounded by.
    """

    optimizer: Optimizer
    generator: torch.Generator | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> Iterator[dict[str, Any]]:
        """Each parameter alone, its state in float32 until the step asks for the next group."""
        for group in self.optimizer.param_groups:
            for parameter in [each for each in group["params"] if each.grad is not None]:
                _widen(self.optimizer, parameter)
                yield {**group, "params": [parameter]}
                yield {**group, "params": []}  # else the step's own lists would keep the state
                _round(self.optimizer, parameter, self.generator)


def _state_of(optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what an optimizer holds of a float32 parameter, element by element: where, and name."""
    state = optimizer.state.get(parameter, {}) if parameter.dtype == torch.float32 else {}
    for name, value in state.items():
        if is_dense(value) and value.shape == parameter.shape and name != "step":
            yield state, name


def _widen(optimizer: Optimizer, parameter: Tensor) -> None:
    for state, name in _state_of(optimizer, parameter):
        state[name] = state[name].float()


def _round(optimizer: Optimizer, parameter: Tensor, generator: torch.Generator | None) -> None:
    """Round the state of a parameter to bfloat16, up or down at random."""
    for state, name in _state_of(optimizer, parameter):
        value = state[name]
        noise = torch.empty_like(value, dtype=torch.int32)
        noise.random_(0, 1 << _LOW_BITS, generator=generator)
        noise.masked_fill_(~value.isfinite(), 0)  # else it would make numbers of them
        value.view(torch.int32).add_(noise).bitwise_and_(-1 << _LOW_BITS)
        state[name] = value.to(torch.bfloat16)


def shares_held(training: TrainingView) -> dict[str, float]:
    """Return the bytes held between steps with state in bfloat16, beside those without.

    By the names of the optimizers whose state that halves; they have stepped.
    """
    shares = {name: _share_held(each) for name, each in named(training).items()}
    return {name: share for name, share in shares.items() if share < 1}


def named(training: TrainingView) -> Mapping[str, Optimizer]:
    """Return the training's optimizers by name; "" is that of one alone."""
    optimizer = training.optimizer
    return optimizer if isinstance(optimizer, Mapping) else {"": optimizer}


def _share_held(optimizer: Optimizer) -> float:
    if type(optimizer) not in _KNOWN:
        return 1.0
    held_bytes = state_bytes = 0
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        held_bytes += 2 * parameter.nbytes  # with its gradient
        states = [state[name] for state, name in _state_of(optimizer, parameter)]
        state_bytes += sum(state.nbytes for state in states if state.dtype == torch.float32)
    return 1 - 0.5 * state_bytes / max(1, held_bytes + state_bytes)
