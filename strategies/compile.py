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
import shutil
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.errors import InvalidArgument, Unsupported
from autofit.plan import CostHint, Dimension, Scalar
from autofit.strategy import COMPILED_CALL, Context, Numerics, Phase, TrainingView

if TYPE_CHECKING:
    from .repeated_blocks import SeenStep

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
# (measured on 2026-11-28).
_BUDGETS: Mapping[Scalar, CostHint] = {
    0.5: CostHint(bytes_per_sample=0.7, seconds_per_sample=1.08),
    0.05: CostHint(bytes_per_sample=0.5, seconds_per_sample=1.25),
}
_OF_WHOLE = 0.5
# The modes of several ranks under which blocks are compiled: `fully_shard` hooks into the calls of
# blocks, and with torch 2.13 on gloo nothing of them was compiled.
_REPLICATED = {"parallel.mode": ("ddp", "ddp_view", "zero1")}
# What lies between blocks is not fused: on a CPU a step took 3 to 17 % longer than with the whole
# model compiled (measured on 2026-11-22).
_NOT_FUSED_BETWEEN = CostHint(bytes_per_sample=1.0, seconds_per_sample=1.05)
# Least share of a compilation's time that compiling blocks alone must save to be offered.
MIN_SAVED = 0.2
_SAMPLES = 2
# Seconds of a compilation: fixed, and for each operator of forward and backward. On a CPU between
# what was measured of transformers and of convolutions
# (measured on 2026-11-29); on a GPU a guess within 20 to 45 s for
# GPT-2-small and ResNet-50.
_FIXED_S, _OPERATOR_S = 10.0, 0.03


class Compile:
    """torch.compile over the model's call: fewer, fused kernels, after seconds of compilation."""

    name = "compile"
    phase = Phase.COMPILE
    numerics = Numerics.ROUNDING
    standard_terms = ("compilation",)

    def unavailable(self, device_type: str) -> str | None:
        """Return why nothing can be compiled for such a device here, or None if it can."""
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
        if any(map(is_compiled, context.model.modules())):  # which the survey notes
            return nothing
        from .repeated_blocks import observe  # in the worker alone

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
        from .compiled_calls import compiled  # in the worker alone

        if (lacking := _lacks(training.device.type)) is not None:
            raise Unsupported(f"{MODE}={mode}: {lacking}")
        modules = [[training.model]]
        if settings.get(REGION, WHOLE) == BLOCKS:
            modules = _blocks_of(training.model, payloads[REGION]["modules"])
        return compiled(training, modules, mode, float(settings.get(BUDGET, 1.0)))

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """Return the equivalent lines of a training script."""
        mode, budget = str(settings.get(MODE, OFF)), settings.get(BUDGET, 1.0)
        if mode == OFF:
            return []
        options, lines = [] if mode == DEFAULT else [f"mode={mode!r}"], list[str]()
        if budget != 1.0:
            options = ["backend=within"]
            lines = [
                "from autofit.strategies.memory_budget import within_budget",
                f"within = within_budget({budget})",
            ]
        if settings.get(REGION, WHOLE) != BLOCKS:
            arguments = ", ".join(["model", *options])
            return ["import torch", *lines, f"model = torch.compile({arguments})"]
        return lines + _lines_of_blocks(payloads[REGION], options)


def _lines_of_blocks(payload: Mapping[str, Any], options: Sequence[str]) -> list[str]:
    block = f"{'model.module' if payload.get('replicated') else 'model'}.get_submodule(name)"
    loop = f"for name in {list(chain.from_iterable(payload['modules']))}:"
    if not payload.get("of_torch"):
        return [loop, f"    {block}.compile({', '.join(options)})"]
    arguments = ", ".join(["block.forward", *options])
    return [
        "import torch",
        loop,
        f"    block = {block}",
        f"    block.forward = torch.compile({arguments})",
    ]


def _modes(context: Context, step: SeenStep) -> Dimension:
    modes = _MODES[context.device.type]
    return Dimension(
        [OFF, *modes],
        when=_PLAIN_CALLS,
        accumulation={GRAPHS: False} if GRAPHS in modes else {},
        trial_cost_s=_cost_s(step.operators),
        fresh_worker=True,
    )


def _regions(context: Context, step: SeenStep) -> Dimension:
    """Return whether blocks alone may be compiled: where that takes clearly less time."""
    whole_s = _cost_s(step.operators)
    saved_s = whole_s - _cost_s(step.operators * step.share_of_blocks)
    if step.objects and not step.blocks:
        context.note(
            f"{REGION}={BLOCKS} skipped: the blocks take objects ({', '.join(step.objects)}) "
            "that may change from call to call, so each block would be compiled on its own. In "
            "transformers, turn the key-value cache off: config.use_cache = False"
        )
    if not step.blocks or saved_s < MIN_SAVED * whole_s:
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
    """Return the memory budgets: of blocks where those are tried alone, else of the model too."""
    when: dict[str, Sequence[Scalar | None]] = {MODE: (DEFAULT,)}
    if BLOCKS not in region.values:
        return Dimension([1.0, _OF_WHOLE], hints={_OF_WHOLE: _BUDGETS[_OF_WHOLE]}, when=when)
    if not region.opt_in:  # a search without blocks, which are not named, has budgets all the same
        when[REGION] = (BLOCKS,)
    return Dimension([1.0, *_BUDGETS], hints=_BUDGETS, when=when)


def _cost_s(operators: float) -> float:
    return round(_FIXED_S + _OPERATOR_S * operators, 1)


def _blocks_of(model: nn.Module, names: Iterable[Iterable[str]]) -> list[list[nn.Module]]:
    if isinstance(model, DistributedDataParallel):  # the names are of what it wraps
        model = model.module
    try:
        return [[model.get_submodule(name) for name in names_of_kind] for names_of_kind in names]
    except AttributeError as error:
        raise InvalidArgument(
            f"{REGION}={BLOCKS}: {error}: this plan is of another model"
        ) from error


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled as a whole, by dynamo or by TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):  # by TorchScript, which dynamo does not enter
        return True
    return vars(module).get(COMPILED_CALL) is not None or type(module).__name__ == "OptimizedModule"


def _lacks(device_type: str) -> str | None:
    """Return what is missing to compile for such a device; None: nothing."""
    if device_type not in ("cpu", "cuda"):
        return f"the device {device_type!r} is not supported"
    name = "CC" if device_type == "cuda" else "CXX"
    chosen = os.environ.get(name, "")
    usual = ("gcc", "clang") if device_type == "cuda" else ("g++",)
    if not any(shutil.which(compiler) for compiler in ([chosen] if chosen else usual)):
        kind = "C" if device_type == "cuda" else "C++"
        return f"no {kind} compiler found ({chosen or ' or '.join(usual)})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers (Python.h) not found"
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None
