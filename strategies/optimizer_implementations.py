"""How torch's optimizers step: which implementation each one has, what it saves, and its choice.

The optimizer, its hyperparameters and its state stay the same objects; the flags of its groups
change. What an implementation does is seen by a step of it, of an optimizer to be thrown away.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer

from autofit.errors import InvalidArgument, Unsupported, release_exception, with_type
from autofit.strategy import TrainingView, attributes_kept, undone

from .calls import Operators
from .optimizer_state import named, shares_held, state_in_bfloat16
from .update_in_backward import share_held, updated_in_backward

FLAGS = {
    "for_loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
"""Implementation -> the flags of a parameter group that choose it."""

_STEPS = 3
_ALL, _PASSES = "all updates", "passes"
_KEPT = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""What constructor and step of a fused optimizer set on it."""


@contextmanager
def applied(
    training: TrainingView,
    implementation: tuple[str, Sequence[str]] | None,
    in_bfloat16: Sequence[str] | None,
    *,
    in_backward: bool,
) -> Iterator[None]:
    """Have a training's optimizers step in another way, for as long as this is entered.

    Args:
        training: whose optimizers they are.
        implementation: a key of `FLAGS`, and the names of the optimizers that take it.
        in_bfloat16: the names of those whose state is held so.
        in_backward: whether each parameter is updated within the backward pass.

    Raises:
        InvalidArgument: there is no optimizer of a name, as where they were several in the search.
        Unsupported: a fused step of this torch's leaves weights as they are.
    """
    with ExitStack() as stack:
        if implementation is not None:
            value, names = implementation
            chosen = _chosen(training, names)
            if value == "fused" and any(map(_leaves_weights, chosen)):
                raise Unsupported(
                    f"optimizer.implementation=fused: torch {torch.__version__} does not update "
                    "16-bit weights on a CPU (pytorch issue 191763): choose another "
                    "implementation"
                )
            stack.enter_context(implemented(chosen, value))
        if in_bfloat16 is not None:
            stack.enter_context(state_in_bfloat16(*_chosen(training, in_bfloat16)))
        if in_backward:
            stack.enter_context(updated_in_backward(training, training.optimizer))
        yield


def _chosen(training: TrainingView, names: Iterable[str]) -> list[Optimizer]:
    """Return the optimizers of those names."""
    optimizers = named(training)
    if missing := [name for name in names if name not in optimizers]:
        raise InvalidArgument(
            f"the plan is for the optimizers {[*names]}, but this training has none named "
            f"{missing[0]!r}: apply it to a training with the optimizers of the search"
        )
    return [optimizers[name] for name in names]


def look(
    samples: int, ranks: int, training: TrainingView, batch: Any
) -> tuple[dict[str, list[str]], float | None, dict[str, float]]:
    """Return the implementations that work, and the shares of bytes that others hold."""
    implementations, share, shares = _implementations(training), None, dict[str, float]()
    if ranks == 1:
        with suppress(torch.OutOfMemoryError):
            share = share_held(samples, training, batch)
            shares = shares_held(training)
    return implementations, share, shares


@contextmanager
def implemented(optimizers: Iterable[Optimizer], value: str) -> Iterator[None]:
    """Have these optimizers step by another implementation, for as long as this is entered.

    Args:
        optimizers: they have the flags `foreach`, and `fused` for that.
        value: a key of `FLAGS`.
    """
    flags = FLAGS[value]
    with ExitStack() as stack:
        for optimizer in optimizers:
            had_scaling = _KEPT[0] in vars(optimizer)
            stack.callback(_place_step_counts, optimizer)
            stack.enter_context(attributes_kept(optimizer, *_KEPT))
            for group in optimizer.param_groups:
                before = {name: group[name] for name in flags if name in group}
                stack.callback(group.update, before)
                group.update({name: flags[name] for name in before})
            if flags["fused"] or had_scaling:
                setattr(optimizer, _KEPT[0], flags["fused"])
            _place_step_counts(optimizer)
        yield


def _place_step_counts(optimizer: Optimizer) -> None:
    """Move the counts of steps to where torch keeps them for the groups' flags.

    Fused and capturable kernels read them on the device, the others on the host.
    """
    for group in optimizer.param_groups:
        fused = bool(group.get("fused"))
        is_double = torch.get_default_dtype() == torch.float64 and not fused
        dtype = torch.float64 if is_double else torch.float32
        for parameter in group["params"]:
            on_device = fused or group.get("capturable")
            device = parameter.device if on_device else torch.device("cpu")
            state = optimizer.state.get(parameter, {})
            steps = state.get("step")
            if isinstance(steps, torch.Tensor) and steps.is_meta:  # any count, in a dry run
                state["step"] = torch.ones_like(steps, device=device, dtype=dtype)
            elif isinstance(steps, torch.Tensor):
                state["step"] = steps.to(device, dtype)


def _implementations(training: TrainingView) -> dict[str, list[str]]:
    """Return each implementation that an optimizer has and does not use already."""
    names_by_value: dict[str, list[str]] = {}
    for name, optimizer in named(training).items():
        own_value = _ran(optimizer) if "foreach" in optimizer.defaults else None
        if own_value is None:
            continue
        for value in FLAGS:
            if value == own_value or (value == "fused" and "fused" not in optimizer.defaults):
                continue
            if value == "foreach" and not _torch_chooses_lists(optimizer):
                continue
            if value == "fused" and any(g.get("dampening") for g in optimizer.param_groups):
                continue  # a first step that a scaler leaves out would leave no momentum
            if value == "fused" and _leaves_weights(optimizer):
                continue
            with implemented([optimizer], value):
                if _ran(optimizer) == value:
                    names_by_value.setdefault(value, []).append(name)
    return {value: names_by_value[value] for value in FLAGS if value in names_by_value}


def _leaves_weights(optimizer: Optimizer) -> bool:
    """Return whether a fused step leaves weights as they are, though they have gradients."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = {p.dtype for p in parameters if p.device.type == "cpu"}
    return any(map(_fused_sgd_leaves, kinds & {torch.bfloat16, torch.float16}))


@cache
def _fused_sgd_leaves(dtype: torch.dtype) -> bool:
    """Return whether a CPU's vectorized loop does not update them (pytorch issue 191763)."""
    weight = torch.nn.Parameter(torch.ones(256, dtype=dtype, device="cpu"))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    return bool((weight == 1).any())


def worth_it(
    implementations: Mapping[str, Sequence[str]],
    least_share: float,
    micro_batches: float,
    training: TrainingView,
    batch: Any,
) -> tuple[dict[str, Sequence[str]], dict[str, str]]:
    """Return what saves enough of a step with this many micro-batches; all where that is hidden.

    Where "for_loop" is found, steps are by lists, whose temporaries all others save: there time
    does not decide. And return why others raise: only a real step has gradients that they refuse.
    """
    optimizers, device, raised = named(training), training.device, dict[str, str]()
    spent_s, spent_by_step = defaultdict[str, float](float), list[dict[str, float]]()

    def time_each(update: Callable[[], None]) -> None:
        """Update as it is, then by each implementation in turn, by the same gradients."""
        began = _now(device)
        spent_s[""] += _seconds(update, device)
        for value in [each for each in implementations if each not in raised]:
            try:
                with implemented([optimizers[name] for name in implementations[value]], value):
                    spent_s[value] += _seconds(update, device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # as the plain one ran, it is this implementation that fails
                raised[value] = with_type(error)
                release_exception(error)
        spent_s[_ALL] += _now(device) - began

    training.step(batch)  # makes the optimizer's state
    with undone(training.wrap_optimizer_step(time_each)):
        for _ in range(_STEPS):
            spent_s.clear()
            step_s = _seconds(partial(training.step, batch), device)
            spent_by_step.append({**spent_s, _PASSES: step_s - spent_s[_ALL]})
    update_s = {
        name: min(each.get(name, 0.0) for each in spent_by_step)
        for name in ("", _PASSES, *implementations)
    }
    if not update_s[""]:  # the user's own training_step updates by itself
        return dict(implementations), {}
    least_s = least_share * (update_s[""] + micro_batches * update_s[_PASSES])
    saves_bytes = "for_loop" in implementations
    worth = {
        value: names
        for value, names in implementations.items()
        if value not in raised and (saves_bytes or update_s[""] - update_s[value] > least_s)
    }
    return worth, raised


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    began = _now(device)
    run()
    return _now(device) - began


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _ran(optimizer: Optimizer) -> str | None:
    """Return by which implementation a step of the smallest parameters ran; None: it raised.

    Their gradients are zero. The optimizer is one to be thrown away.
    """
    ran = set[str]()
    try:
        for parameter in _smallest(optimizer):
            parameter.grad = torch.zeros_like(parameter)
        with Operators(lambda operator, _: ran.add(operator.name())):
            optimizer.step()
    except Exception as error:  # whatever it raises, it does not work
        release_exception(error)
        return None
    finally:
        optimizer.zero_grad(set_to_none=True)
    lists = [value for value in ("fused", "foreach") if f"aten::_{value}_" in "".join(ran)]
    return [*lists, "for_loop"][0]


def _smallest(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the smallest parameter of each group, type and device."""
    smallest: dict[Any, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            kind = number, parameter.dtype, parameter.device
            if parameter.requires_grad:
                smallest[kind] = min(parameter, smallest.get(kind, parameter), key=torch.numel)
    return list(smallest.values())


def _torch_chooses_lists(optimizer: Optimizer) -> bool:
    """Return whether torch, left to itself, steps such parameters in lists."""
    parameters = [torch.nn.Parameter(torch.zeros_like(p)) for p in _smallest(optimizer)]
    return _ran(torch.optim.SGD(parameters)) == "foreach"
