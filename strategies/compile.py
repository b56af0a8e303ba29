"""torch.compile over the model's call, or over its repeated blocks.

`compile.mode` starts at "off". "default" has the model's calls compiled by inductor; loss functions
and the optimizer stay as they are. The micro-batch and the rest of a batch each have code for
their own shapes; where samples have other lengths too, or sizes are many, one code serves all.

The model keeps its class, its names and its parameters: only calls are others while the settings
are in force. On a GPU there is one mode more: "reduce-overhead" replays the calls as CUDA graphs,
which saves launches and holds memory of its own. On a CPU inductor has none.

`compile.region` is "whole", or "blocks": those that repeat are compiled, once for all of a kind,
which takes less time, and the rest of the model runs as it is. Of several ranks, only under
`DistributedDataParallel`.

`compile.memory_budget` is how a compiled plan recomputes: the share of the activations that the
partitioner may keep for the backward, 1.0 being what it would keep where time alone counts. Where
blocks may be compiled alone it is of each block. The levels of checkpointing are for plans that are
not compiled.

CUDA graphs write the gradients of a replay over those of the one before, which torch reports or not
(pytorch issues 169545 and 96693), so "reduce-overhead" is for one micro-batch alone.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.errors import InvalidArgument, Unsupported
from autofit.plan import CostHint, Dimension, Scalar
from autofit.strategy import (
    COMPILED_CALL,
    Context,
    Numerics,
    Phase,
    TrainingView,
    attributes_kept,
)

from .repeated_blocks import SeenStep, observe

MODE, REGION, BUDGET = "compile.mode", "compile.region", "compile.memory_budget"
OFF, DEFAULT, GRAPHS = "off", "default", "reduce-overhead"
WHOLE, BLOCKS = "whole", "blocks"
# By the type of the device.
_MODES = {"cpu": (DEFAULT,), "cuda": (DEFAULT, GRAPHS)}
# Units that are checkpointed one by one break the model's call up: under compile the partitioner
# chooses what is kept, within the memory budget.
_PLAIN_CALLS = {"checkpointing.level": (0, None)}
# Shares of the activations, and what they held and cost beside 1.0. The last is for blocks alone:
# whole models held more with it than with 0.5 in two of eight cases, since more is computed again
# at once. 0.0 would do that with a whole region
# (benchmarks/results/compiled-models-2026-11-28.md).
_BUDGETS: Mapping[Scalar, CostHint] = {
    0.5: CostHint(bytes_per_sample=0.7, seconds_per_sample=1.08),
    0.05: CostHint(bytes_per_sample=0.5, seconds_per_sample=1.25),
}
_OF_WHOLE = 0.5
# The modes of several ranks under which blocks are compiled: `fully_shard` hooks into the calls of
# blocks, and with torch 2.13 on gloo nothing of them was compiled.
_REPLICATED = {"parallel.mode": ("ddp", "ddp_view", "zero1")}
# What lies between blocks is not fused: on a CPU a step took 3 to 17 % longer than with the whole
# model compiled (benchmarks/results/compile-2026-11-22.md).
_NOT_FUSED_BETWEEN = CostHint(bytes_per_sample=1.0, seconds_per_sample=1.05)
# Least share of a compilation's time that compiling blocks alone must save to be offered.
LEAST_SAVED = 0.2
_SAMPLES = 2
# Seconds of a compilation: fixed, and for each operator of forward and backward. On a CPU as in
# benchmarks/results/compile-2026-11-22.md; on a GPU a guess within 20 to 45 s for GPT-2-small and
# ResNet-50.
_CPU_COST_S = (15.0, 0.07)
_CUDA_COST_S = (10.0, 0.03)
_MARKS = "_dynamo"
# The class of the node of a compiled function in the graph of autograd.
_COMPILED_BACKWARD = "CompiledFunctionBackward"
_MOST_REASONS = 3
_LIMIT = "Dynamo recompile limit exceeded"
# Sizes of a batch that have code of their own: the micro-batch and the rest of a batch, in training
# and in evaluation.
_MOST_SIZES = 4
# How deep tensors are looked for in the model's arguments.
_DEPTH = 4


class Compile:
    """torch.compile over the model's call: fewer, fused kernels, after seconds of compilation."""

    name = "compile"
    phase = Phase.COMPILE
    numerics = Numerics.ROUNDING
    standard_terms = ("compilation",)

    def unavailable(self, device_type: str) -> str | None:
        """Return why nothing can be compiled for such a device here; None: it can."""
        return _lacks(device_type)

    def in_standard_terms(self, settings: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        """Return the mode, where the model is compiled as a whole and keeps all activations."""
        mode = settings.get(MODE, OFF)
        is_whole = settings.get(REGION, WHOLE) == WHOLE
        keeps_all = settings.get(BUDGET, 1.0) == 1.0
        return {"compilation": mode} if mode != OFF and is_whole and keeps_all else {}

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return modes, regions and budgets where a compiler is found and the step calls the model.

        Regions where blocks repeat, and one of each kind takes clearly less time to compile.
        """
        nothing = {MODE: Dimension([OFF]), REGION: Dimension([WHOLE]), BUDGET: Dimension([1.0])}
        if context.device.type == "meta":
            context.note(f"{MODE} skipped: a compiled step can only be measured, not predicted")
            return nothing
        if (lacking := _lacks(context.device.type)) is not None:
            context.note(f"{MODE} skipped: {lacking}")
            return nothing
        if any(map(_is_compiled, context.model.modules())):  # which the survey notes
            return nothing
        step: SeenStep = context.with_training(observe, min(_SAMPLES, context.samples_per_step))
        if not step.calls_model:
            context.note(f"{MODE} skipped: the training step does not call the model")
            return nothing
        region = _regions(context, step)
        return {
            MODE: _modes(context, step),
            REGION: region,
            BUDGET: _budgets(region),
        }

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Have calls compiled when they first run; leaving the context undoes it.

        Raises:
            Unsupported: there is no compiler for the device, or nothing to compile on it.
            InvalidArgument: the payload names a block that this model does not have.
        """
        mode = str(settings.get(MODE, OFF))
        if mode == OFF:
            return nullcontext()
        if (lacking := _lacks(training.device.type)) is not None:
            raise Unsupported(f"{MODE}={mode}: {lacking}")
        alike = [[training.model]]
        if settings.get(REGION, WHOLE) == BLOCKS:
            alike = _blocks_of(training.model, payloads[REGION]["modules"])
        compiler = _Compiler(mode, float(settings.get(BUDGET, 1.0)))
        return _compiled(training, alike, compiler)

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """Return the equivalent lines of a training script."""
        mode, budget = str(settings.get(MODE, OFF)), settings.get(BUDGET, 1.0)
        if mode == OFF:
            return []
        options = "" if mode == DEFAULT else f"mode={mode!r}"
        lines = []
        if budget != 1.0:
            options = "backend=within"
            lines = [
                "from autofit.strategies.memory_budget import within_budget",
                f"within = within_budget({budget})",
            ]
        if settings.get(REGION, WHOLE) != BLOCKS:
            given = f"model, {options}" if options else "model"
            return ["import torch", *lines, f"model = torch.compile({given})"]
        payload = payloads[REGION]
        block = f"{'model.module' if payload.get('replicated') else 'model'}.get_submodule(name)"
        loop = f"for name in {list(chain.from_iterable(payload['modules']))}:"
        if not payload.get("of_torch"):
            return [*lines, loop, f"    {block}.compile({options})"]
        given = f"block.forward, {options}" if options else "block.forward"
        return [
            "import torch",
            *lines,
            loop,
            f"    block = {block}",
            f"    block.forward = torch.compile({given})",
        ]


def _modes(context: Context, step: SeenStep) -> Dimension:
    modes = _MODES[context.device.type]
    return Dimension(
        [OFF, *modes],
        when=_PLAIN_CALLS,
        accumulation={GRAPHS: False} if GRAPHS in modes else {},
        trial_cost_s=_cost_s(context, step.operators),
        fresh_worker=True,
    )


def _regions(context: Context, step: SeenStep) -> Dimension:
    """Return whether blocks alone may be compiled: where that takes clearly less time."""
    whole_s = _cost_s(context, step.operators)
    saved_s = whole_s - _cost_s(context, step.operators * step.share_of_blocks)
    if step.objects and not step.blocks:
        context.note(
            f"{REGION}={BLOCKS} skipped: the blocks are given objects ({', '.join(step.objects)}) "
            "that each call may find changed, so that each would be compiled for itself; training "
            "needs no cache of keys and values (in transformers: config.use_cache = False)"
        )
    if not step.blocks or saved_s < LEAST_SAVED * whole_s:
        return Dimension([WHOLE])
    payload: dict[str, Any] = {"modules": step.blocks}
    when: dict[str, Sequence[Scalar | None]] = {MODE: (DEFAULT,)}
    if context.world.size > 1:
        when |= _REPLICATED
        payload["replicated"] = True
    names = chain.from_iterable(step.blocks)
    if any(type(context.model.get_submodule(n)).__module__.startswith("torch.") for n in names):
        payload["of_torch"] = True  # `Module.compile` compiles nothing of such a class
    return Dimension(
        [WHOLE, BLOCKS],
        when=when,
        payloads={BLOCKS: payload},
        trial_costs_s={BLOCKS: round(-saved_s, 1)},
        hints={BLOCKS: _NOT_FUSED_BETWEEN},
        # On a CPU what lies between blocks weighs so much that blocks were slower than eager where
        # the whole model was 19 % faster: tried first, they spoke against compilation.
        opt_in=context.device.type == "cpu",
    )


def _budgets(region: Dimension) -> Dimension:
    """Return the memory budgets: of blocks where they may be compiled alone, else of the model."""
    when: dict[str, Sequence[Scalar | None]] = {MODE: (DEFAULT,)}
    if BLOCKS not in region.values:
        return Dimension([1.0, _OF_WHOLE], hints={_OF_WHOLE: _BUDGETS[_OF_WHOLE]}, when=when)
    return Dimension([1.0, *_BUDGETS], hints=_BUDGETS, when={**when, REGION: (BLOCKS,)})


def _cost_s(context: Context, operators: float) -> float:
    fixed_s, operator_s = _CUDA_COST_S if context.device.type == "cuda" else _CPU_COST_S
    return round(fixed_s + operator_s * operators, 1)


def _blocks_of(model: nn.Module, names: Iterable[Iterable[str]]) -> list[list[nn.Module]]:
    if isinstance(model, DistributedDataParallel):  # the names are of what it wraps
        model = model.module
    try:
        return [[model.get_submodule(name) for name in alike] for alike in names]
    except AttributeError as error:
        raise InvalidArgument(
            f"{REGION}={BLOCKS}: {error}: this plan is of another model"
        ) from error


@dataclass(frozen=True)
class _Compiler:
    """How calls are compiled.

    Attributes:
        mode: of torch.compile.
        budget: share of the activations that may be kept for the backward.
    """

    mode: str
    budget: float

    @cached_property
    def _options(self) -> Mapping[str, Any]:
        if self.budget == 1.0:
            return {"mode": self.mode}
        from .memory_budget import within_budget  # loads inductor

        return {"backend": within_budget(self.budget)}  # one for all: code is kept by its backend

    def compiled(self, module: nn.Module, code: CodeType, dynamic: bool | None) -> Any:
        """Return the compiled call of a module; what is compiled is kept by the code object."""
        template = _calling(module)
        call = FunctionType(code, _globals(module), "call", None, template.__closure__)
        return torch.compile(call, dynamic=dynamic, **self._options)


@contextmanager
def _compiled(
    training: TrainingView, alike: Sequence[Sequence[nn.Module]], compiler: _Compiler
) -> Iterator[None]:
    """Have the calls of these modules compiled; those of one sequence share their code."""
    model = training.model
    with ExitStack() as stack:
        stack.enter_context(_environment_kept())
        if compiler.mode == GRAPHS:
            stack.enter_context(_graphs_freed(training.device))
            stack.callback(training.wrap_forward(partial(_not_accumulating, model)))
        notes = _Notes(compiler.mode)
        stack.enter_context(_marks_kept(model))
        for modules in alike:
            codes = _Codes(compiler)
            for module in modules:
                stack.enter_context(attributes_kept(module, COMPILED_CALL))
                vars(module)[COMPILED_CALL] = _by_shapes(
                    module, codes, is_block=module is not model
                )
        stack.callback(training.add_notes(notes.lines))
        yield


class _Codes:
    """The code objects of modules that are alike, by the shapes that they are compiled for.

    What is compiled, and how often, is counted by code object.
    """

    def __init__(self, compiler: _Compiler) -> None:
        self._compiler = compiler
        self._of_shapes: dict[Any, CodeType] = {}
        self._of_any = _new_code()

    def of_any_shape(self, module: nn.Module) -> Callable[..., Any]:
        """Return the compiled call of a module that serves any shape."""
        return self._compiler.compiled(module, self._of_any, None)  # type: ignore[no-any-return]

    def of(self, module: nn.Module, shapes: Any) -> Callable[..., Any] | None:
        """Return its call for these shapes; None: there is code for as many others already."""
        if shapes not in self._of_shapes and len(self._of_shapes) >= _MOST_SIZES:
            return None
        code = self._of_shapes.setdefault(shapes, _new_code())
        return self._compiler.compiled(module, code, False)  # type: ignore[no-any-return]


def _new_code() -> CodeType:
    return _calling(nn.Identity()).__code__.replace()


def _hooks_within(module: nn.Module) -> list[Mapping[int, Any]]:
    """Return the hooks of a module and of its parts by kind, those to come too."""
    return [
        hooks
        for part in module.modules()
        for hooks in (
            part._forward_hooks,
            part._forward_pre_hooks,
            part._backward_hooks,
            part._backward_pre_hooks,
        )
    ]


def _by_shapes(module: nn.Module, codes: _Codes, *, is_block: bool) -> Callable[..., Any]:
    """Return the compiled call of a module; a block runs as it is written while it has hooks.

    Dynamo takes hooks in and does not guard on them, so that code that blocks share would run the
    hooks of another block, or none.

    Code for given shapes is the fastest, and torch compiles one function that often and no oftener
    (`recompile_limit`): from then on it would run as it is written.
    """
    calls: dict[Any, Callable[..., Any]] = {}
    lengths: set[Any] = set()
    any_shape = codes.of_any_shape(module)
    hooks = _hooks_within(module) if is_block else []

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]  # torch
            raise Unsupported(
                f"{MODE}: hooks of all modules (register_module_forward_hook and the like) "
                f"do not run in compiled code: remove them, or use {MODE}={OFF}"
            )
        if any(hooks):
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        shapes = tuple(_shapes((args, kwargs)))
        lengths.add(tuple(shape[1:] for shape in shapes))
        has_lengths = len(lengths) > 1
        if not has_lengths and shapes not in calls and (own := codes.of(module, shapes)):
            calls[shapes] = own
        output = (any_shape if has_lengths else calls.get(shapes, any_shape))(*args, **kwargs)
        if is_block:
            _refuse_second_derivatives(output)
        return output

    return call


def _refuse_second_derivatives(output: Any) -> None:
    """Have a backward through a compiled block refused that is to be differentiated itself.

    Torch refuses the second backward, where the first one gets that far: with compiled code behind
    the block too, it fails at once, with an error that names no cause.
    """
    for each in output if isinstance(output, tuple | list) else [output]:
        node: Any = getattr(each, "grad_fn", None)
        if type(node).__name__ == _COMPILED_BACKWARD:
            node.register_prehook(_check_first)


def _check_first(gradients: Any) -> None:
    if torch.is_grad_enabled():  # in a backward: with create_graph
        raise Unsupported(
            f"{REGION}={BLOCKS}: torch.compile does not support double backward "
            f"(create_graph=True): use {MODE}={OFF}"
        )


def _shapes(value: Any, depth: int = _DEPTH) -> Iterator[torch.Size]:
    """Yield the shapes of the tensors in containers, and in the attributes of other objects."""
    if isinstance(value, torch.Tensor):
        yield value.shape
    elif depth and not isinstance(value, type | nn.Module):
        inner: Any = value if isinstance(value, tuple | list) else getattr(value, "__dict__", {})
        inner = value if isinstance(value, Mapping) else inner
        for each in inner.values() if isinstance(inner, Mapping) else inner:
            yield from _shapes(each, depth - 1)


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
        if limits := now.limits - self._before.limits:
            yield (
                f"compile: {limits} x compiled as often as torch does (recompile_limit), so that "
                "calls for which no compiled code fits run eagerly"
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
    limits: int


def _counted() -> _Counted:
    from torch._dynamo.utils import counters, get_compilation_metrics

    metrics = get_compilation_metrics()
    return _Counted(
        counters["stats"]["unique_graphs"],
        dict(counters["graph_break"]),
        [each.recompile_reason for each in metrics if each.recompile_reason],
        counters["inductor"]["cudagraph_skips"],
        sum(n for cause, n in counters["unimplemented"].items() if cause.startswith(_LIMIT)),
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
    if isinstance(module, torch.jit.ScriptModule):  # by TorchScript, which dynamo does not enter
        return True
    return vars(module).get(COMPILED_CALL) is not None or type(module).__name__ == "OptimizedModule"


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
