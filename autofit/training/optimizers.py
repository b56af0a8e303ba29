"""The optimizer of a workload: what may stand for one, and how it is made for a model.

A function of parameters makes a new optimizer each time. A live optimizer travels with its model,
groups and state; all that is left to do is to move its state to where the model is.

`LossScale` keeps float16 gradients in range over one optimizer or several: each optimizer is
stepped at most once under one scale, and the scale changes only while no gradients wait that have
it, or these are brought to the new one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch.optim import optimizer as optimizer_module

from autofit.errors import InvalidArgument, Unsupported, users_code
from autofit.training.batch import map_tensors
from autofit.units import kind_of

OptimizerFactory: TypeAlias = Callable[[Any], torch.optim.Optimizer]
Optimizers: TypeAlias = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
OptimizerChoice: TypeAlias = OptimizerFactory | Optimizers | Mapping[str, OptimizerFactory]
Place: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
FactoryWrapper: TypeAlias = Callable[[OptimizerFactory], OptimizerFactory]
_Entry = TypeVar("_Entry")


DEFAULT_OPTIMIZER = torch.optim.AdamW
"""Trains what no optimizer was given for. It holds the most state of the usual ones."""


def optimizer_name(chosen: object) -> str:
    """Return the class or function of an optimizer by name; of several, each after its key."""
    if isinstance(chosen, Mapping):
        return ", ".join(f"{key}: {optimizer_name(each)}" for key, each in chosen.items())
    while isinstance(chosen, partial):
        chosen = chosen.func
    return str(getattr(chosen, "__name__", type(chosen).__name__)).strip("<>")


def by_name(chosen: _Entry | Mapping[str, _Entry]) -> Mapping[str, _Entry]:
    """Return a mapping as it is, and a single optimizer under the name ""."""
    return chosen if isinstance(chosen, Mapping) else {"": chosen}


def check_has_training_step(chosen: object, *, has_training_step: bool) -> None:
    """Refuse several optimizers unless a training_step says when each of them steps.

    Raises:
        InvalidArgument: a mapping of optimizers, and no training_step.
    """
    if isinstance(chosen, Mapping) and not has_training_step:
        raise InvalidArgument(
            "a mapping of optimizers needs training_step=(training, batch) -> loss, "
            "which decides when each one steps"
        )


def check_optimizer(chosen: object, model: object, *, has_training_step: bool) -> None:
    """Refuse an `optimizer=` that cannot make an optimizer for the model.

    Raises:
        InvalidArgument: it is none, it trains another model, or it lacks what it needs beside it.
    """
    check_has_training_step(chosen, has_training_step=has_training_step)
    for entry in by_name(chosen).values():
        if isinstance(entry, torch.optim.Optimizer):
            check_trains(entry, model)
        elif not callable(entry):
            raise InvalidArgument(
                "optimizer must be a function of the parameters, such as "
                f"torch.optim.AdamW, or a live Optimizer, got {entry!r}"
            )


def check_is_factory(chosen: object, *, has_training_step: bool) -> None:
    """Refuse all but a function of parameters: a live optimizer would train none of the shards.

    Raises:
        InvalidArgument: it is live, or it lacks what it needs beside it.
    """
    check_has_training_step(chosen, has_training_step=has_training_step)
    for entry in by_name(chosen).values():
        if not callable(entry):
            raise InvalidArgument(
                "a plan for several ranks creates the optimizer itself, from the sharded "
                "parameters: pass apply a function such as torch.optim.AdamW or "
                "functools.partial(torch.optim.AdamW, lr=3e-4), not a live "
                f"{type(entry).__name__}. Load optimizer state into training.optimizer"
            )


def build_optimizer(
    chosen: OptimizerChoice,
    model: torch.nn.Module,
    place: Place | None,
    wrappers: Sequence[FactoryWrapper] = (),
) -> Optimizers:
    """The live optimizer, or a new one for the model's parameters.

    Args:
        chosen: as the user gave it.
        model: on its device already.
        place: how a live optimizer's state is moved there; None: it is there.
        wrappers: each is put around a function of parameters before that is called.

    Raises:
        InvalidArgument: a function made no optimizer, its key names no submodule, or the model has
            no parameters.
        Unsupported: a live optimizer would have to be wrapped.
    """
    entries: Mapping[str, Any] = by_name(chosen)
    try:
        built = {
            name: _optimizer_for(entry, _submodule(model, name, entry), place, wrappers)
            for name, entry in entries.items()
        }
    except ValueError as error:
        if isinstance(error, InvalidArgument) or any(True for _ in model.parameters()):
            raise
        raise InvalidArgument(
            f"{type(model).__name__} has no parameters, so there is nothing to train ({error}): "
            "pass the model that holds them"
        ) from error
    return built if isinstance(chosen, Mapping) else built[""]


def check_steps_alone(optimizer: Optimizers) -> None:
    """Refuse an optimizer that calls the model itself: a step of ours has run it before.

    Raises:
        InvalidArgument: its `step` must be given a closure, as that of LBFGS.
    """
    for entry in by_name(optimizer).values():
        closure = inspect.signature(entry.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise InvalidArgument(
                f"{type(entry).__name__} steps by calling a closure that runs the model: "
                "pass training_step=(training, batch) -> loss, and call its step(closure) "
                "there"
            )


_STEP_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_global_optimizer_pre_hooks",  # of every optimizer
    "_global_optimizer_post_hooks",
)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether functions of the user's run before or after each step of an optimizer."""
    held = {**vars(optimizer_module), **vars(optimizer)}
    hooks = [hook for name in _STEP_HOOKS for hook in held.get(name, {}).values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("autofit.") for hook in hooks)


def check_trains(optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Refuse the optimizer of another model: its step would update nothing.

    Raises:
        InvalidArgument: it holds none of the model's parameters, or there is no live model.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            "a live optimizer belongs to a live model's parameters, but this model is "
            "built by a function: pass optimizer=parameters -> Optimizer"
        )
    if not holds_any(optimizer, model):
        raise InvalidArgument(
            f"the live optimizer ({type(optimizer).__name__}) holds none of the "
            "model's parameters: create it from this model's parameters, after any "
            "change that replaces them"
        )


def holds_any(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    """Return whether an optimizer updates any of the model's parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return any(id(parameter) in own for parameter in held)


def _submodule(
    model: torch.nn.Module, name: str, entry: OptimizerFactory | torch.optim.Optimizer
) -> torch.nn.Module:
    if isinstance(entry, torch.optim.Optimizer):
        return model
    try:
        return model.get_submodule(name)
    except AttributeError:
        children = [child for child, _ in model.named_children()]
        raise InvalidArgument(
            f"optimizer[{name!r}] is a function, so its key must name the submodule "
            f"whose parameters it gets; the model has {children}. Or pass live "
            "optimizers."
        ) from None


def _optimizer_for(
    entry: OptimizerFactory | torch.optim.Optimizer,
    model: torch.nn.Module,
    place: Place | None,
    wrappers: Sequence[FactoryWrapper],
) -> torch.optim.Optimizer:
    if isinstance(entry, torch.optim.Optimizer):
        if wrappers:
            raise Unsupported(
                "the plan shards the parameters, so it must create the optimizers: pass "
                "optimizer= as a function of the parameters"
            )
        if place is not None:
            _place_state(entry, place)
        return entry
    for wrapper in wrappers:
        entry = wrapper(entry)
    with users_code():
        built = entry(list(model.parameters()))
    if not isinstance(built, torch.optim.Optimizer):
        raise InvalidArgument(
            f"optimizer must return a torch.optim.Optimizer, got {kind_of(built)}"
        )
    return built


def _place_state(optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Move the state by hand: `load_state_dict` would cast it and run the user's hooks."""
    on_device = {
        parameter
        for group in optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for parameter in group["params"]
    }
    for parameter, state in optimizer.state.items():

        def move(tensor: torch.Tensor, counts_too: bool = parameter in on_device) -> torch.Tensor:
            # torch keeps step counts on the host, unless its kernels read them
            return place(tensor) if tensor.dim() or counts_too else tensor

        optimizer.state[parameter] = map_tensors(move, state)


class LossScale:
    """A gradient scaler, if there is one, and which optimizers were stepped under its scale.

    Attributes:
        scaler: what scales; None: nothing does, and everything here passes through.
        was_used: whether it has scaled a loss since this was last set to False.
    """

    def __init__(self) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self.was_used = False
        self._stepped: list[torch.optim.Optimizer] = []

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, which backward starts from."""
        if self.scaler is None:
            return loss
        self.was_used = True
        return self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of that optimizer."""
        if self.scaler is not None and _gradients([optimizer]):
            self.scaler.unscale_(optimizer)

    def begin(
        self, optimizers: Sequence[torch.optim.Optimizer], of: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Before `optimizers` are stepped, `of` all that there are: one scale, one step of each."""
        if any(optimizer in self._stepped for optimizer in optimizers):
            self.adapt(of)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update, unless a gradient is infinite or NaN.

        An optimizer without any gradient steps by itself: the scaler refuses it.
        """
        _begin_momentum(optimizer)
        if self.scaler is None or not _gradients([optimizer]):
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self._stepped.append(optimizer)

    def end(self, of: Sequence[torch.optim.Optimizer]) -> None:
        """After steps: the scale stays while gradients of others wait that have it."""
        if self.scaler is not None and not _gradients(of):
            self.adapt(of)

    def adapt(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let the scaler choose the next scale, and bring gradients that wait to it."""
        stepped, self._stepped = self._stepped, []
        if self.scaler is None or not stepped:
            return
        waiting = _gradients(optimizers)
        before = self.scaler.get_scale() if waiting else 1.0  # a GPU is waited for to read it
        self.scaler.update()
        factor = self.scaler.get_scale() / before if waiting else 1.0
        for gradient in waiting if factor != 1.0 else ():
            gradient.mul_(factor)


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter that a fused SGD is to step the momentum that it lacks: zeros.

    They equal none where nothing dampens. Torch makes momentum of all parameters or of none, so it
    fails where some get their first gradient later than others; and where a scaler leaves out the
    first step, it goes on from memory that was never written.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not (group["fused"] and group["momentum"]) or group["dampening"]:
            continue
        for parameter in group["params"]:
            gradient, state = parameter.grad, optimizer.state[parameter]
            if gradient is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(gradient)


def _gradients(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = {parameter for group in groups for parameter in group["params"]}
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
