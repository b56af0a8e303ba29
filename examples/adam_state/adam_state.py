"""The state of Adam and AdamW in 8 bits, by torchao or bitsandbytes where one is installed.

An example of a strategy that is not installed with autofit: `strategies=[AdamState()]`, or by its
name once `pip install ./examples/adam_state` has made it known.

`adam_state.format` starts at "default". "torchao_8bit" and "bitsandbytes_8bit" step in place of the
user's optimizer, with its hyperparameters as they are at each step, and hold both moments in blocks
of 8-bit codes (Dettmers et al., 2021, arXiv 2110.02861), small tensors aside. That is a rounding of
the state which no comparison of one step shows, so it is offered only to who names this strategy.

The moments live in the other optimizer alone: one that has stepped before is refused, and what is
to be saved is the state of `training.optimizer` while the settings are in force.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from autofit.strategies.compile import Compile
from torch.optim import Optimizer

from autofit.errors import Unsupported, release_exception, with_type
from autofit.plan import CostHint, Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView

SETTING = "adam_state.format"
_LIBRARIES = {"torchao_8bit": "torchao", "bitsandbytes_8bit": "bitsandbytes"}
_FOLLOWED = ("lr", "betas", "eps", "weight_decay")
_BLOCK, _MIN_VALUES = 256, 4096
"""Values that share a scale of four bytes, and the fewest of a tensor that is held in codes: the
same in both libraries."""
_COMPILED_SHAPE_S = 8.0
"""Seconds in which torchao compiles the update of the parameters of one shape."""
_MISSING = "neither torchao nor bitsandbytes is installed"


class AdamState:
    """How the moments of Adam and AdamW are held."""

    name = "adam_state"
    phase = Phase.OPTIMIZER
    numerics = Numerics.REDUCED_PRECISION
    by_name_only = True

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return what the installed libraries can step this optimizer with."""
        only_default = {SETTING: Dimension(["default"])}
        if context.device.type == "meta":
            context.note(f"{SETTING} skipped: its memory can only be measured, not predicted")
            return only_default
        if not _installed():
            context.note(f"{SETTING} skipped: {_MISSING}")
            return only_default
        found = context.with_training(_found, 1)
        for value, why in found["left_out"].items():
            context.note(f"{SETTING}={value} skipped: {why}")
        values = found["names"]
        if not values:
            return only_default
        fixed = CostHint(bytes_per_sample=1.0, seconds_per_sample=1.0, fixed_bytes=found["share"])
        return {
            SETTING: Dimension(
                ["default", *values],
                payloads={value: {"optimizers": names} for value, names in values.items()},
                hints=dict.fromkeys(values, fixed),
                # bitsandbytes makes parameters contiguous, and so undoes a layout; neither library
                # has other implementations, nor fused scaling
                when={
                    "memory_format.layout": ("default", None),
                    "optimizer.implementation": ("default", None),
                },
                trial_costs_s={
                    value: _COMPILED_SHAPE_S * found["shapes"]
                    for value in values
                    if value == "torchao_8bit"
                },
            )
        }

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Step with the other optimizer; leaving the context puts the user's back.

        Raises:
            Unsupported: the library is not installed, or the optimizer has stepped before.
        """
        value = str(settings.get(SETTING, "default"))
        if value == "default":
            return nullcontext()
        return _replaced(training, value, payloads[SETTING]["optimizers"])

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """Return the equivalent lines of a training script."""
        value = str(settings.get(SETTING, "default"))
        if value == "default":
            return []
        library, names = _LIBRARIES[value], payloads[SETTING]["optimizers"]

        def make(optimizer: str) -> str:
            chosen = f"{{name: group[name] for name in {('params', *_FOLLOWED)}}}"
            groups = f"[{chosen} for group in {optimizer}.param_groups]"
            return f"getattr({library}.optim, type({optimizer}).__name__ + '8bit')({groups})"

        made = f"optimizer = {make('optimizer')}"
        if names != [""]:
            made = f"optimizer |= {{each: {make('optimizer[each]')} for each in {names}}}"
        return [f"import {library}.optim", f"{made}  # before its first step and its scheduler"]


@contextmanager
def _replaced(training: TrainingView, value: str, names: list[str]) -> Iterator[None]:
    before = training.optimizer
    made = {name: _in_8_bits(each, value) for name, each in _named(before) if name in names}
    training.optimizer = {**before, **made} if isinstance(before, Mapping) else made[""]
    try:
        yield
    finally:
        training.optimizer = before


def _in_8_bits(optimizer: Optimizer, value: str) -> Optimizer:
    """Return an optimizer over the same parameters that follows this one's hyperparameters.

    Raises:
        Unsupported: the library is not installed, or the optimizer has state.
    """
    library = _LIBRARIES[value]
    if library not in _installed().values():
        raise Unsupported(f"{SETTING}={value}: {library} is not installed: pip install {library}")
    if why := _why_not(optimizer):
        raise Unsupported(f"{SETTING}={value}: {why}")
    groups = [
        {"params": group["params"], **{name: _plain(group[name]) for name in _FOLLOWED}}
        for group in optimizer.param_groups
    ]
    kind = f"{type(optimizer).__name__}8bit"
    made: Optimizer = getattr(import_module(f"{library}.optim"), kind)(groups)
    made.register_step_pre_hook(partial(_follow, optimizer))
    return made


def _follow(leader: Optimizer, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Take over hyperparameters as they are now: a scheduler changes them in the user's own.

    It warns where that one makes no step.
    """
    if hasattr(leader.step, "_wrapped_by_lr_sched"):
        leader._opt_called = True  # type: ignore[attr-defined]  # the scheduler's own mark
    for group, given in zip(optimizer.param_groups, leader.param_groups, strict=True):
        for name in _FOLLOWED:
            if isinstance(group[name], torch.Tensor):  # torchao compiles with it as a tensor
                group[name].fill_(float(given[name]))
            else:
                group[name] = _plain(given[name])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _why_not(optimizer: Optimizer) -> str | None:
    """Return why no library steps like this optimizer; None: they do."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"{type(optimizer).__name__} is neither Adam nor AdamW of torch"
    if optimizer.state:
        return "the optimizer has already stepped, and its state would be lost: create a new one"
    for group in optimizer.param_groups:
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                return f"{name}=True is not supported"
        if group.get("decoupled_weight_decay") is not (type(optimizer) is torch.optim.AdamW):
            return "decoupled_weight_decay is not supported"
        if any(p.is_complex() or p.layout is not torch.strided for p in group["params"]):
            return "complex and sparse parameters are not supported"
    return None


def _found(training: TrainingView, batch: Any) -> dict[str, Any]:
    """Return, as JSON data, what can be used with which optimizers, and what it would save.

    "names": value -> names of the optimizers; "left_out": value -> why; "shapes": how many
    parameters differ in shape or type; "share": bytes of weights, gradients and state, beside those
    without this strategy.
    """
    names: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    kinds: set[Any] = set()
    before_bytes = saved_bytes = 0.0
    optimizers = dict(_named(training.optimizer))
    for value in _installed():
        for name, optimizer in optimizers.items():
            why = _why_not(optimizer) or _tried(optimizer, value, training.device.type)
            if why is None:
                names.setdefault(value, []).append(name)
            else:
                left_out[value] = why
        if value in names:
            left_out.pop(value, None)
    for parameter in (p for g in _groups(optimizers, names) for p in g["params"]):
        kinds.add((parameter.shape, parameter.dtype))
        before_bytes += 4 * parameter.nbytes
        if parameter.numel() >= _MIN_VALUES:
            codes = 2 * (1 + 4 / _BLOCK) * parameter.numel()
            saved_bytes += max(0.0, 2 * parameter.nbytes - codes)
    share = 1 - saved_bytes / before_bytes if before_bytes else 1.0
    return {"names": names, "left_out": left_out, "shapes": len(kinds), "share": share}


def _groups(
    optimizers: Mapping[str, Optimizer], names: Mapping[str, list[str]]
) -> Iterator[dict[str, Any]]:
    used = {name for each in names.values() for name in each}
    for name in used:
        yield from optimizers[name].param_groups


def _tried(optimizer: Optimizer, value: str, device_type: str) -> str | None:
    """Return why the library does not step these parameters; None: it does, or compiles first."""
    if value == "torchao_8bit":
        return Compile().unavailable(device_type)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    try:
        made = _in_8_bits(optimizer, value)
        for parameter in (min(parameters, key=torch.numel), max(parameters, key=torch.numel)):
            parameter.grad = torch.zeros_like(parameter)
        made.step()
    except Exception as error:  # whatever it raises, it does not work
        release_exception(error)
        return with_type(error)
    finally:
        optimizer.zero_grad(set_to_none=True)
    return None


def _installed() -> dict[str, str]:
    return {v: name for v, name in _LIBRARIES.items() if importlib.util.find_spec(name)}


def _named(given: Any) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers of a training with their names; "" is that of a single one."""
    yield from given.items() if isinstance(given, Mapping) else [("", given)]
