"""torch.compile over the model's call, or over its repeated blocks.

`compile.mode` starts at "off". "default" has the model's calls compiled by inductor, with static
shapes; loss functions and the optimizer stay as they are. The model keeps its class, its names and
its parameters: only its call is another one while the settings are in force. On a GPU there are two
modes more: "reduce-overhead" replays the calls as CUDA graphs, which saves launches and holds
memory of its own, and "max-autotune-no-cudagraphs" times several kernels for each product and
convolution, which takes longest. On a CPU inductor has neither.

CUDA graphs write the gradients of a replay over those of the one before, which torch reports or not
(pytorch issues 169545 and 96693), so "reduce-overhead" is for one micro-batch alone.

`compile.region` is "model", or "blocks": what repeats in the model is compiled once for all of its
kind, which takes less time and leaves the rest as it is; of several ranks, under
`DistributedDataParallel` alone. `compile.memory_budget` is the share of the activations that the
partitioner may keep for the backward, and computes again beyond that (1.0: as it likes): under
compile it stands in for the levels of checkpointing.

A compilation takes many seconds and depends on every other setting and on the micro-batch, so each
value says what trying it costs. What it did is in the notes of the measurement: how many graphs,
which calls were broken up and why, and what was compiled again.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.errors import Unsupported
from autofit.plan import CostHint, Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView

if TYPE_CHECKING:
    from .uncompiled_step import UncompiledStep

MODE, REGION, BUDGET = "compile.mode", "compile.region", "compile.memory_budget"
OFF, MODEL, BLOCKS = "off", "model", "blocks"
DEFAULT, GRAPHS, AUTOTUNED = "default", "reduce-overhead", "max-autotune-no-cudagraphs"
# By the type of the device: those of `torch._inductor.list_mode_options` that differ there. Both
# others speak to Triton and CUDA alone, but for batched products, which a CPU may autotune too.
_MODES = {"cpu": (DEFAULT,), "cuda": (DEFAULT, GRAPHS, AUTOTUNED)}
# As measured on a decoder on a CPU; there 0.0, at which all is computed again, held no less than
# 1.0, since it is computed at once (benchmarks/results/compile-2026-11-22.md).
_BUDGETS: dict[Scalar, CostHint] = {0.5: CostHint(bytes_per_sample=0.75, seconds_per_sample=1.08)}
# Units that are checkpointed one by one break the model's call up: under compile the partitioner
# chooses what is kept.
_PLAIN_CALLS = {"checkpointing.level": (0, None)}
# The modes of several ranks under which blocks are compiled. `fully_shard` hooks into the calls of
# blocks; in a run on gloo with torch 2.13 nothing of them was compiled.
_REPLICATED = {"parallel.mode": ("ddp", "ddp_view", "zero1")}
_SAMPLES = 2
_CPU_COST_S = (15.0, 0.07)
# Seconds of a compilation: fixed, and for each operator of forward and backward. On a CPU as in
# benchmarks/results/compile-2026-11-22.md; on a GPU a guess within 20 to 45 s for GPT-2-small and
# ResNet-50.
_CUDA_COST_S = (10.0, 0.03)
# Seconds of a processor that compile and time the kernels of a product
# (benchmarks/results/compile-2026-11-22.md).
_PRODUCT_COST_S = 60.0
# Processes that inductor compiles in, at most (`torch._inductor.config.compile_threads`).
_MOST_WORKERS = 32
# The attribute of a module that `Module.__call__` prefers to its own call.
_CALL = "_compiled_call_impl"
_MARKS = "_dynamo"
# Least share of a compilation's time that compiling blocks alone must save to be offered.
_LEAST_SAVED = 0.2
_MOST_REASONS = 3
_ABSENT = object()


class Compile:
    """torch.compile over the model's call: fewer, fused kernels, after seconds of compilation."""

    name = "compile"
    phase = Phase.COMPILE
    numerics = Numerics.ROUNDING

    def unavailable(self, device_type: str) -> str | None:
        """Return why nothing can be compiled for such a device here; None: it can."""
        return _lacks(device_type)

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the modes where a compiler is found and the step calls the model."""
        off = {MODE: Dimension([OFF])}
        if context.device.type == "meta":
            context.note(f"{MODE} skipped: a compiled step can only be measured, not predicted")
            return off
        if (lacking := _lacks(context.device.type)) is not None:
            context.note(f"{MODE} skipped: {lacking}")
            return off
        if any(map(_is_compiled, context.model.modules())):  # which the survey notes
            return off
        from .uncompiled_step import observed  # in the worker alone

        step: UncompiledStep = context.with_training(
            observed, min(_SAMPLES, context.samples_per_step)
        )
        if not step.calls_model:
            context.note(f"{MODE} skipped: the training step does not call the model")
            return off
        return {
            MODE: Dimension(
                [OFF, *_MODES[context.device.type]],
                when=_PLAIN_CALLS,
                accumulation={GRAPHS: False} if GRAPHS in _MODES[context.device.type] else {},
                trial_cost_s=_cost_s(context, step.operators),
                trial_costs_s=_costs_of_modes(context, step),
                fresh_worker=True,
                relieves=("memory traffic", "launches"),
            ),
            REGION: _regions(context, step),
            BUDGET: _budgets(context, step),
        }

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Have the model's calls compiled when they first run; leaving the context undoes it.

        Raises:
            Unsupported: there is no compiler for the device, or nothing to compile on it.
        """
        mode = str(settings.get(MODE, OFF))
        if mode == OFF:
            return nullcontext()
        if (lacking := _lacks(training.device.type)) is not None:
            raise Unsupported(f"{MODE}={mode}: {lacking}")
        modules = [training.model]
        if settings.get(REGION, MODEL) == BLOCKS:
            model = training.model
            if isinstance(model, DistributedDataParallel):  # the names are of what it wraps
                model = model.module
            modules = [model.get_submodule(name) for name in payloads[REGION]["modules"]]
        return _compiled(training, modules, mode, float(settings.get(BUDGET, 1.0)))

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """Return the equivalent lines of a training script."""
        mode = str(settings.get(MODE, OFF))
        if mode == OFF:
            return []
        options = "" if mode == DEFAULT else f"mode={mode!r}, "
        lines = ["import torch", f"model = torch.compile(model, {options}dynamic=False)"]
        if settings.get(REGION, MODEL) == BLOCKS:
            payload = payloads[REGION]
            model = "model.module" if payload.get("replicated") else "model"
            lines = [
                f"for name in {payload['modules']}:",
                f"    {model}.get_submodule(name).compile({options}dynamic=False)",
            ]
        if (budget := settings.get(BUDGET, 1.0)) != 1.0:
            lines = [
                "import torch._functorch.config",
                f"torch._functorch.config.activation_memory_budget = {budget}",
                *lines,
            ]
        return lines


def _cost_s(context: Context, operators: float) -> float:
    fixed_s, operator_s = _CUDA_COST_S if context.device.type == "cuda" else _CPU_COST_S
    return round(fixed_s + operator_s * operators, 1)


def _costs_of_modes(context: Context, step: UncompiledStep) -> dict[Scalar, float]:
    """Return the seconds of the modes that take longer to compile than others."""
    if AUTOTUNED not in _MODES[context.device.type]:
        return {}
    workers = min(os.cpu_count() or 1, _MOST_WORKERS)
    autotuning_s = _PRODUCT_COST_S * step.products / workers
    return {AUTOTUNED: round(_cost_s(context, step.operators) + autotuning_s, 1)}


def _regions(context: Context, step: UncompiledStep) -> Dimension:
    """Return whether blocks alone may be compiled: where that takes clearly less time."""
    saved_s = _cost_s(context, step.operators) - _cost_s(context, step.operators_of_blocks)
    if len(step.blocks) < 2 or saved_s < _LEAST_SAVED * _cost_s(context, step.operators):
        return Dimension([MODEL])
    payload: dict[str, Any] = {"modules": step.blocks}
    when: dict[str, Sequence[Scalar | None]] = {MODE: (DEFAULT,)}
    if context.world.size > 1:
        when |= _REPLICATED
        payload["replicated"] = True
    return Dimension(
        [MODEL, BLOCKS],
        when=when,
        payloads={BLOCKS: payload},
        trial_costs_s={BLOCKS: -saved_s},
        relieves=("memory traffic", "launches"),
    )


def _budgets(context: Context, step: UncompiledStep) -> Dimension:
    """Return the memory budgets; none where random numbers would be drawn anew to recompute."""
    if step.draws:
        context.note(
            f"{BUDGET} skipped: the step draws random numbers ({', '.join(step.draws)}), "
            "and torch's partitioner may draw others on recomputation, which makes "
            "gradients wrong (pytorch issue 190758)"
        )
        return Dimension([1.0])
    return Dimension(
        [1.0, *_BUDGETS],
        hints=_BUDGETS,
        when={MODE: (DEFAULT,), REGION: (MODEL, None)},
        relieves=("memory traffic",),
    )


@contextmanager
def _compiled(
    training: TrainingView, modules: Sequence[nn.Module], mode: str, budget: float
) -> Iterator[None]:
    """Have these modules' calls compiled; they share what is compiled where they are alike."""
    with ExitStack() as stack:
        stack.enter_context(_environment_kept())
        if mode == GRAPHS:
            stack.enter_context(_graphs_freed(training.device))
            stack.callback(training.wrap_forward(partial(_not_accumulating, training.model)))
        notes = _Notes(mode)
        stack.enter_context(_marks_kept(training.model))
        if budget != 1.0:  # around forwards, which is where the partitioner runs
            from torch._functorch import config

            stack.callback(
                training.wrap_forward(lambda: config.patch(activation_memory_budget=budget))
            )
        # A code object of their own: what is compiled, and how often, is counted by code object.
        code = _calling(training.model).__code__.replace()
        for module in modules:
            template = _calling(module)
            call = FunctionType(code, _globals(module), "call", None, template.__closure__)
            before = vars(module).get(_CALL, _ABSENT)
            stack.callback(_put_back, module, before)
            vars(module)[_CALL] = torch.compile(call, mode=mode, dynamic=False)
        stack.callback(training.add_notes(notes.lines))
        yield


def _calling(module: nn.Module) -> FunctionType:
    """Return a function that calls the module.

    The frame that is compiled: of a frame of torch's own, as `Module.compile` takes it, nothing is
    compiled where the module's class is torch's too.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's

    return call  # type: ignore[return-value]  # it is a plain function


def _globals(module: nn.Module) -> dict[str, Any]:
    """Return the globals of the frame that is compiled.

    Dynamo looks for the globals of what it inlines in the module of their name. A class of a script
    that travelled to a worker has another module of that name there, so that the frame has to have
    the same globals as its forward.
    """
    own = getattr(type(module).forward, "__globals__", None)
    if own is None:
        return globals()
    home = sys.modules.get(own.get("__name__", ""))
    found: dict[str, Any] = globals() if home is not None and vars(home) is own else own
    return found


@contextmanager
def _graphs_freed(device: torch.device) -> Iterator[None]:
    """Free the CUDA graphs that are recorded inside, and the memory that is theirs.

    An output of a graph holds its function by way of autograd, so that nothing else would free it.
    Those of the caller's own compiled functions are freed with them, so not where there are some.
    """
    from torch._inductor import cudagraph_trees

    before = cudagraph_trees.get_manager(device.index or 0, create_if_none_exists=False)
    try:
        yield
    finally:
        if before is None:
            cudagraph_trees.reset_cudagraph_trees()


@contextmanager
def _not_accumulating(model: nn.Module) -> Iterator[None]:
    """Refuse a forward whose gradients would be added to others.

    Raises:
        Unsupported: there are gradients already.
    """
    if torch.is_grad_enabled() and any(each.grad is not None for each in model.parameters()):
        raise Unsupported(
            f"{MODE}={GRAPHS}: a CUDA graph writes its gradients over those of its last replay, so "
            "that they cannot be added up (pytorch issue 169545): drop the gradients before each "
            "forward, or choose another mode"
        )
    yield


def _put_back(module: nn.Module, before: Any) -> None:
    if before is _ABSENT:
        vars(module).pop(_CALL, None)
    else:
        vars(module)[_CALL] = before


@contextmanager
def _marks_kept(model: nn.Module) -> Iterator[None]:
    """Take away the attributes with which dynamo marks parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [set(vars(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, names in zip(tensors, before, strict=True):
            for name in [n for n in vars(tensor) if n.startswith(_MARKS) and n not in names]:
                delattr(tensor, name)


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Put the environment variables back that torch's compiler sets for itself."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in [n for n in os.environ if "TORCHINDUCTOR" in n or "TRITON" in n]:
            if name not in before:
                del os.environ[name]
            else:
                os.environ[name] = before[name]


class _Notes:
    """What torch's compiler counts, from now on.

    Args:
        mode: that it compiles in.
    """

    def __init__(self, mode: str) -> None:
        self._mode, self._before = mode, _counted()

    def lines(self) -> Iterator[str]:
        """Yield what was compiled, and every break and repetition with its reason."""
        now = _counted()
        graphs = now.graphs - self._before.graphs
        if not graphs:
            yield "compile: nothing was compiled, every call ran eagerly"
            return
        breaks = _added(self._before.breaks, now.breaks)
        again = now.recompilations[len(self._before.recompilations) :]
        words = f"compile: {graphs} graphs, {sum(breaks.values())} graph breaks"
        yield f"{words}, {len(again)} recompilations"
        if self._mode == GRAPHS and (left_out := now.without_graphs - self._before.without_graphs):
            yield (
                f"compile: {left_out} graphs could not be captured as CUDA graphs and run without"
            )
        for reason, times in list(breaks.items())[:_MOST_REASONS]:
            yield f"compile: graph break ({times} x): {_line(reason)}"
        for reason, times in _causes(again)[:_MOST_REASONS]:
            yield f"compile: recompiled ({times} x): {_line(reason)}"


@dataclass(frozen=True)
class _Counted:
    graphs: int
    breaks: Mapping[str, int]
    recompilations: Sequence[str]
    without_graphs: int


def _counted() -> _Counted:
    from torch._dynamo.utils import counters, get_compilation_metrics

    metrics = get_compilation_metrics()
    return _Counted(
        counters["stats"]["unique_graphs"],
        dict(counters["graph_break"]),
        [each.recompile_reason for each in metrics if each.recompile_reason],
        counters["inductor"]["cudagraph_skips"],
    )


def _added(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {key: n - before.get(key, 0) for key, n in now.items() if n > before.get(key, 0)}


def _causes(reasons: Sequence[str]) -> list[tuple[str, int]]:
    """Return the first reason of each cause, and how many have it.

    A counter that a forward keeps is another value, and another reason, each time. They have the
    guard's line of code in common, which dynamo writes behind it, or else all but the numbers.
    """
    alike: dict[str, list[str]] = {}
    for reason in reasons:
        guard, _, line = reason.partition("\n")[0].partition("(HINT")[0].strip().partition("# ")
        alike.setdefault(line or re.sub(r"\d+", "", guard), []).append(reason)
    return [(first, 1 + len(others)) for first, *others in alike.values()]


def _line(reason: str) -> str:
    return " ".join(reason.split())[:200]


def _is_compiled(module: torch.nn.Module) -> bool:
    return vars(module).get(_CALL) is not None or type(module).__name__ == "OptimizedModule"


def _lacks(device_type: str) -> str | None:
    """Return what is missing to compile for such a device; None: nothing."""
    if device_type not in ("cpu", "cuda"):
        return f"the device {device_type!r} is not supported"
    name = "CC" if device_type == "cuda" else "CXX"
    given = os.environ.get(name, "")
    usual = ("gcc", "clang") if device_type == "cuda" else ("g++",)
    if not any(shutil.which(compiler) for compiler in ([given] if given else usual)):
        kind = "C" if device_type == "cuda" else "C++"
        return f"no {kind} compiler found ({given or ' or '.join(usual)})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers (Python.h) not found"
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None
