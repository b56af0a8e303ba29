"""How the user's own optimizer steps: which of torch's implementations it takes, and when.

`optimizer.implementation` starts at "default". "for_loop" updates one parameter after another,
"foreach" many at once, with temporaries as large as the parameters, and "fused" all in one kernel
without temporaries. The optimizer, its hyperparameters and its state stay the same objects; only
the flags of its groups change, as `foreach=` and `fused=` would set them where it is made.

What an update costs depends on no other setting, so it is measured before the search: an
implementation that saves next to nothing, or raises, is not offered, and costs no probes.

`optimizer.state` starts at "default", the type of the parameters. "bfloat16" holds it in half the
bytes (`optimizer_state`), which no comparison of one step can judge: it is offered only to who
names this strategy.

`optimizer.when` starts at "step", after the backward pass. "backward" updates each parameter within
it (`update_in_backward`); that is tried on one step before it is offered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.errors import InvalidArgument, Unsupported, release_exception, with_type
from autofit.plan import CostHint, Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView, attributes_kept, undone

from .optimizer_state import STATE, named, shares_held, state_in_bfloat16
from .update_in_backward import LINES, WHEN, share_held, updated_in_backward

SETTING = "optimizer.implementation"
FLAGS = {
    "for_loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
"""Value -> the flags of a parameter group that choose it."""

WORTH = 0.01
"""Least share of a step's time that an implementation must save to be offered."""
_SAMPLES = 8
_SAMPLES_OF_ONE_STEP = 2
_STEPS = 3
_KEPT = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""What constructor and step of a fused optimizer set on it."""
_SAME_ACTIVATIONS = CostHint(bytes_per_sample=1.0, seconds_per_sample=1.0)


class OptimizerImplementation:
    """How the optimizer's update is computed, and when.

    Args:
        numerics: how far its settings may change the arithmetic.
        has_step: whether `Training.step` trains: no other loop leaves the gradients alone.
    """

    name = "optimizer"
    phase = Phase.OPTIMIZER
    numerics_of: Mapping[str, Numerics] = MappingProxyType(
        {SETTING: Numerics.ROUNDING, WHEN: Numerics.EXACT}
    )
    standard_terms = ("optimizer_implementation",)

    def __init__(
        self, numerics: Numerics = Numerics.REDUCED_PRECISION, *, has_step: bool = True
    ) -> None:
        self.numerics, self._has_step = numerics, has_step

    def within(self, numerics: Numerics) -> OptimizerImplementation:
        """Return the strategy without settings that go further."""
        return OptimizerImplementation(numerics, has_step=self._has_step)

    def in_anothers_loop(self) -> OptimizerImplementation:
        """Return the strategy without updates in the backward pass."""
        return OptimizerImplementation(self.numerics, has_step=False)

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the implementations, when the update may be, and from what state it may be.

        As steps show it, and as far as the arithmetic may change.
        """
        samples = min(_SAMPLES_OF_ONE_STEP, context.samples_per_step)
        look = partial(_look, samples, context.world.size)
        implementations, share, shares = context.with_training(look, samples)
        found = {}
        if self.numerics >= Numerics.ROUNDING:
            found[SETTING] = _implementations(context, implementations)
        found.update(_of_one_step(share, shares))
        return {
            setting: dimension
            for setting, dimension in found.items()
            if self.numerics_of.get(setting, Numerics.REDUCED_PRECISION) <= self.numerics
            and (setting != WHEN or self._has_step)
        }

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Choose how the optimizer steps, and when; leaving the context undoes it."""
        return _applied(training, settings, payloads)

    def in_standard_terms(self, settings: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        """Return the setting in standard terms: an optimizer implementation."""
        value = settings.get(SETTING, "default")
        return {} if value == "default" else {"optimizer_implementation": value}

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """Return the equivalent lines of a training script."""
        value = str(settings.get(SETTING, "default"))
        others = LINES if settings.get(WHEN) == "backward" else []
        if settings.get(STATE) == "bfloat16":
            others = [*others, *_lines_of_state(payloads)]
        if value == "default":
            return [*others]
        names = payloads[SETTING]["optimizers"]
        chosen = "[optimizer]" if names == [""] else f"[optimizer[name] for name in {names}]"
        flags = ", ".join(f"{name}={flag}" for name, flag in FLAGS[value].items())
        return [
            f"for each in {chosen}:  # before its first step, or give these where it is made",
            "    for group in each.param_groups:",
            f"        group.update({flags})",
            *others,
        ]


def _lines_of_state(payloads: Mapping[str, Any]) -> list[str]:
    names = payloads[STATE]["optimizers"]
    chosen = "optimizer" if names == [""] else f"*(optimizer[name] for name in {names})"
    return [
        "from autofit.strategies.optimizer import state_in_bfloat16",
        f"with state_in_bfloat16({chosen}):  # around the training",
    ]


@contextmanager
def _applied(
    training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
) -> Iterator[None]:
    value = str(settings.get(SETTING, "default"))
    with ExitStack() as stack:
        if value != "default":
            chosen = _chosen(training, payloads[SETTING]["optimizers"])
            if value == "fused" and any(map(_leaves_weights, chosen)):
                raise Unsupported(
                    f"{SETTING}=fused: torch {torch.__version__} leaves weights in 16 bits as they "
                    "are on a CPU (pytorch issue 191763): choose another implementation"
                )
            stack.enter_context(implemented(chosen, value))
        if settings.get(STATE, "default") == "bfloat16":
            chosen = _chosen(training, payloads[STATE]["optimizers"])
            stack.enter_context(state_in_bfloat16(*chosen))
        if settings.get(WHEN, "step") == "backward":
            stack.enter_context(updated_in_backward(training, training.optimizer))
        yield


def _chosen(training: TrainingView, names: Iterable[str]) -> list[Optimizer]:
    """Return the optimizers of those names.

    Raises:
        InvalidArgument: there is none of one, as where they were several in the search.
    """
    given = named(training)
    if missing := [name for name in names if name not in given]:
        raise InvalidArgument(
            f"the plan is for the optimizers {[*names]}, and there is none of the name "
            f"{missing[0]!r} here: apply it to a training with the optimizers of the search"
        )
    return [given[name] for name in names]


def _implementations(context: Context, found: Mapping[str, Sequence[str]]) -> Dimension:
    """Return those of the implementations that are worth it.

    Without "foreach" where torch would not choose it itself: there (on a CPU) its functions
    loop over the tensors. Without what raises, or saves neither time nor temporaries, except
    on the meta device, where that cannot be measured.
    """
    if found and context.device.type != "meta":
        samples = min(_SAMPLES, context.samples_per_step)
        micro_batches = context.samples_per_step / samples
        tried = list(found)
        raised: Mapping[str, str] = {}
        with suppress(torch.OutOfMemoryError):
            found, raised = context.with_training(partial(_worth_it, found, micro_batches), samples)
        for value, why in raised.items():
            context.note(f"{SETTING}={value} skipped: a step with it raised {why}")
        if left_out := [value for value in tried if value not in found and value not in raised]:
            context.note(
                f"{SETTING}: {', '.join(left_out)} skipped: saves less than {WORTH:.0%} of a step"
            )
    return Dimension(
        ["default", *found],
        payloads={value: {"optimizers": names} for value, names in found.items()},
        hints=dict.fromkeys(found, _SAME_ACTIVATIONS),
        lever=next((value for value in ("fused", "foreach") if value in found), None),
    )


def _look(
    samples: int, ranks: int, training: TrainingView, batch: Any
) -> tuple[dict[str, list[str]], float | None, dict[str, float]]:
    """Return the implementations that work, and the shares of bytes held for `_of_one_step`."""
    found, share, shares = _found(training), None, dict[str, float]()
    if ranks == 1:
        with suppress(torch.OutOfMemoryError):
            share = share_held(samples, training, batch)
            shares = shares_held(training)
    return found, share, shares


def _of_one_step(share: float | None, shares: Mapping[str, float]) -> dict[str, Dimension]:
    """Return when the update may be, and in what types its state, of one device.

    In the backward pass where that is as exact and saves bytes.
    """
    found = {}
    own_state: Mapping[str, Sequence[Scalar | None]] = {"adam_state.format": ("default", None)}
    if share is not None:
        found[WHEN] = Dimension(
            ["step", "backward"],
            hints={"backward": replace(_SAME_ACTIVATIONS, fixed_bytes=share)},
            when={
                **own_state,
                "checkpointing.level": (0, None),  # a recomputation may read what is updated
                "compile.mode": ("off", None),
                "precision.dtype": ("default", "tf32", "bfloat16", None),  # float16 has a scaler
            },
            accumulation={"backward": False},
        )
    if shares:
        found[STATE] = Dimension(
            ["default", "bfloat16"],
            payloads={"bfloat16": {"optimizers": [*shares]}},
            hints={"bfloat16": replace(_SAME_ACTIVATIONS, fixed_bytes=max(shares.values()))},
            when=own_state,
            opt_in=True,
        )
    return found


@contextmanager
def implemented(optimizers: Iterable[Optimizer], value: str) -> Iterator[None]:
    """Have these optimizers step by another implementation, for as long as this is entered.

    Args:
        optimizers: they have the flags `foreach`, and `fused` for that.
        value: a key of `FLAGS`.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(_one_implemented(optimizer, FLAGS[value]))
        yield


@contextmanager
def _one_implemented(optimizer: Optimizer, flags: Mapping[str, bool]) -> Iterator[None]:
    had_scaling = _KEPT[0] in vars(optimizer)
    with ExitStack() as stack:
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


def _found(training: TrainingView) -> dict[str, list[str]]:
    """Return each implementation that an optimizer has and does not use already."""
    found: dict[str, list[str]] = {}
    for name, optimizer in named(training).items():
        own = _ran(optimizer) if "foreach" in optimizer.defaults else None
        if own is None:
            continue
        for value in FLAGS:
            if value == own or (value == "fused" and "fused" not in optimizer.defaults):
                continue
            if value == "foreach" and not _torch_chooses_lists(optimizer):
                continue
            if value == "fused" and any(g.get("dampening") for g in optimizer.param_groups):
                continue  # a first step that a scaler leaves out would leave no momentum
            if value == "fused" and _leaves_weights(optimizer):
                continue
            with implemented([optimizer], value):
                if _ran(optimizer) == value:
                    found.setdefault(value, []).append(name)
    return {value: found[value] for value in FLAGS if value in found}


def _leaves_weights(optimizer: Optimizer) -> bool:
    """Return whether a fused step leaves weights as they are, though they have gradients."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = {p.dtype for p in parameters if p.device.type == "cpu" and p.is_floating_point()}
    return any(map(_fused_sgd_leaves, kinds))


@cache
def _fused_sgd_leaves(dtype: torch.dtype) -> bool:
    """Return whether the loop over vectors of a CPU does: pytorch issue 191763."""
    weight = torch.nn.Parameter(torch.ones(256, dtype=dtype, device="cpu"))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    return bool((weight == 1).any())


def _worth_it(
    found: Mapping[str, Sequence[str]], micro_batches: float, training: TrainingView, batch: Any
) -> tuple[dict[str, Sequence[str]], dict[str, str]]:
    """Return what saves enough of a step with so many micro-batches; all where that is hidden.

    Where "for_loop" is found, steps are by lists, whose temporaries all others save: there time
    does not decide. And return why others raise: only a real step has gradients that they refuse.
    """
    training.step(batch)  # makes the optimizer's state
    plain_s, step_s = _timed(training, batch)
    if not plain_s:  # the user's own training_step updates by itself
        return dict(found), {}
    least_s = WORTH * (plain_s + micro_batches * (step_s - plain_s))
    saves_bytes = "for_loop" in found
    worth: dict[str, Sequence[str]] = {}
    raised: dict[str, str] = {}
    for value, names in found.items():
        optimizers = [each for name, each in named(training).items() if name in names]
        try:
            with implemented(optimizers, value):
                if plain_s - _timed(training, batch)[0] > least_s or saves_bytes:
                    worth[value] = names
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # as plain steps ran, it is this implementation that fails
            raised[value] = with_type(error)
            release_exception(error)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
    return worth, raised


def _timed(training: TrainingView, batch: Any) -> tuple[float, float]:
    """Return the least seconds of the updates in a step, and of a whole step."""
    updates, steps = [], []
    spent = 0.0

    def timed(update: Callable[[], None]) -> None:
        nonlocal spent
        began = _now(training.device)
        update()
        spent += _now(training.device) - began

    with undone(training.wrap_optimizer_step(timed)):
        for _ in range(_STEPS):
            spent, began = 0.0, _now(training.device)
            training.step(batch)
            steps.append(_now(training.device) - began)
            updates.append(spent)
    return min(updates), min(steps)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _ran(optimizer: Optimizer) -> str | None:
    """Return by which implementation a step of the smallest parameters ran; None: it raised.

    Their gradients are zero. The optimizer is one to be thrown away.
    """
    try:
        for parameter in _smallest(optimizer):
            parameter.grad = torch.zeros_like(parameter)
        ran = _Operators()  # type: ignore[no-untyped-call]  # torch does not annotate it
        with ran:
            optimizer.step()
    except Exception as error:  # whatever it raises, it does not work
        release_exception(error)
        return None
    finally:
        optimizer.zero_grad(set_to_none=True)
    return ran.implementation


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
    alike = [torch.nn.Parameter(torch.zeros_like(p)) for p in _smallest(optimizer)]
    return _ran(torch.optim.SGD(alike)) == "foreach"


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Records which implementation an optimizer steps by."""

    implementation: str = "for_loop"

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: a step that is compiled in part stays so while this is entered."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("aten::_fused_"):
            self.implementation = "fused"
        elif name.startswith("aten::_foreach_") and self.implementation != "fused":
            self.implementation = "foreach"
        return func(*args, **(kwargs or {}))
