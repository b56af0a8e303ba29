"""A workload's fingerprint: equal for trainings that cost the same, different where they may not.

It covers module classes, their code, hooks and public attributes, parameters and buffers (shape,
dtype, requires_grad), the sample batch's shapes and dtypes, optimizer and its options, the loss
functions' code with their defaults and what they close over, the global batch, torch, the kind of
device, and how torch computes there (default dtype, TF32, deterministic algorithms, attention
kernels, the allocator's options). It leaves out values: weights, learning rates, data; which of
several equal devices it is; what a search may try (`allow_accumulation_change`); and the modules of
the user's classes, since a class is `__main__.Net` in a script and `train.Net` on the command line.
Functions that this code calls by name are not entered.

It has one digest for each part, so that a difference can be named.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from itertools import filterfalse
from types import BuiltinFunctionType, CellType, CodeType
from typing import Any

import torch

from autofit.devices.base import Environment
from autofit.training.batch import describe
from autofit.training.optimizers import Optimizers, by_name
from autofit.training.samples import Made
from autofit.training.workload import Workload

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NOT_ABOUT_COST = {"lr", "initial_lr"}
_PLAIN = (bool, int, str, bytes, range, slice, type(None), Enum, torch.dtype, torch.device)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_ONLY_ON_THE_CPU = {"torch.num_threads"}
# Environment variables that change how torch and CUDA allocate and compute.
_ABOUT_COST = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
)
_MOST_DEEP = 5
_FUNCTIONS = (
    "loss_fn",
    "criterion",
    "loss_weight",
    "before_step",
    "training_step",
    "collate_fn",
    "eval_step",
)


def fingerprint(
    workload: Workload,
    model: torch.nn.Module,
    optimizer: Optimizers,
    environment: Environment,
    computing: Mapping[str, Any],
) -> str:
    """Return a digest of each part above, as `model=0123abcd;samples=...`.

    Args:
        workload: its functions and sample batch are read; only a batch function is called.
        model: the workload's model, built.
        optimizer: the workload's optimizer, built.
        environment: where it would train.
        computing: flags that change how torch computes there, such as TF32, with their values.
    """
    kind, size = environment.device.partition(":")[0], workload.sample_batch_size
    *others, (_, longest) = workload.mix(workload.described_size)
    shorter = [f"{share:g} {describe(batch)}" for share, batch in others]
    shapes = describe(longest)
    if isinstance(workload.samples, Made):  # of batches that may have other shapes each time
        shapes = {name: text.partition("[")[0] for name, text in shapes.items()}
    parts: dict[str, Iterable[str]] = {
        "model": _model_lines(model),
        "samples": [f"{workload.global_batch} {size} {shapes}", *shorter],
        "optimizer": _optimizer_lines(optimizer),
        "functions": _function_lines(workload),
        "torch": [environment.torch],
        "device": [f"{kind} {environment.gpu}"],
        "flags": _flag_lines(kind, computing),
    }
    return ";".join(f"{name}={_digest(lines)}" for name, lines in parts.items())


def differing_parts(one: str, other: str) -> tuple[str, ...]:
    """Return the names of the parts in which two fingerprints differ."""
    differing = sorted({*one.split(";")} ^ {*other.split(";")})
    return tuple(dict.fromkeys(part.partition("=")[0] for part in differing))


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="backslashreplace") + b"\n")
    return digest.hexdigest()[:12]


def _flag_lines(kind: str, computing: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(computing.items()):
        if kind == "cpu" or name not in _ONLY_ON_THE_CPU:
            yield f"flag {name} {value}"
    for name in _ABOUT_COST:
        yield f"variable {name} {os.environ.get(name)}"


def _function_lines(workload: Workload) -> Iterator[str]:
    for name in _FUNCTIONS:
        yield f"{name} {_describe(getattr(workload, name))}"
    yield f"clip {workload.clip_grad_norm is not None}"
    if workload.eval_samples is not None:
        yield str(describe(workload.evaluation_batch(workload.eval_samples)))


def _model_lines(model: torch.nn.Module, deep: int = 0) -> Iterator[str]:
    yield from (_describe(kind, deep) for kind in dict.fromkeys(map(type, model.modules())))
    for name, module in model.named_modules():
        own = vars(module)  # with a forward of its own, if it has one
        public = {key: own[key] for key in sorted(own) if not key.startswith("_")}
        hooks = [list(own.get(each, {}).values()) for each in _HOOKS]
        yield f"{_name(type(module))} {_ADDRESS.sub('', module.extra_repr())}"
        yield f"module {name} {_describe(public, max(deep, 1))} {_describe(hooks, deep)}"
    order: dict[int, int] = {}  # tells which are shared
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            place = order.setdefault(id(tensor), len(order))
            yield f"tensor {place} {name} {_describe(tensor)} {tensor.requires_grad}"


def _optimizer_lines(optimizer: Optimizers) -> Iterator[str]:
    for name, one in by_name(optimizer).items():
        yield f"optimizer {name} {_describe(type(one))}"
        for group in one.param_groups:
            about_cost = {key: group[key] for key in sorted(group.keys() - _NOT_ABOUT_COST)}
            yield _describe(about_cost)


def _is_torchs(kind: Any) -> bool:
    return str(kind.__module__ or "builtins").partition(".")[0] in ("torch", "builtins")


def _name(kind: Any) -> str:
    """Return the name of a class or function, with its module where that is torch."""
    return f"{kind.__module__}.{kind.__qualname__}" if _is_torchs(kind) else kind.__qualname__


def _describe(value: Any, deep: int = 0) -> str:
    """Describe a function by code, defaults and closure, a container by parts, else the class."""
    if isinstance(value, float):
        return "some float" if value else "0.0"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.layout}"
    parts = [] if deep == _MOST_DEEP else list(_parts(value, deep + 1))
    is_named = isinstance(value, type | BuiltinFunctionType)
    return f"{_name(value if is_named else type(value))} {parts}"


def _parts(value: Any, deep: int) -> Iterator[str]:
    """Describe the parts of a value; it has none where its class alone describes it."""
    opened: Iterable[Any] = ()
    if isinstance(value, torch.nn.Module):
        yield from _model_lines(value, deep)
    elif isinstance(value, functools.partial):
        opened = (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        opened = (*value, *value.values())
    elif isinstance(value, (tuple, list)):
        opened = value
    elif isinstance(value, (set, frozenset)):  # whose order changes from process to process
        yield from sorted(_describe(each, deep) for each in value)
    elif isinstance(value, type):  # its code and that of its bases, but for torch's own
        for each in filterfalse(_is_torchs, value.__mro__):
            for name, member in sorted(vars(each).items()):
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if hasattr(function, "__code__"):
                    yield f"method {each.__qualname__}.{name} {_describe(function, deep)}"
    elif isinstance(code := getattr(value, "__code__", None), CodeType):
        yield f"{value.__qualname__} {_code(code)}"
        held = zip(code.co_freevars, value.__closure__ or (), strict=False)
        cells = [cell for name, cell in held if name != "__class__" and cell != CellType()]
        opened = (value.__defaults__, value.__kwdefaults__, *(c.cell_contents for c in cells))
        owner = getattr(value, "__self__", None)  # of a bound method
        if not isinstance(owner, torch.nn.Module | type):
            opened = (*opened, getattr(owner, "__dict__", None))
    elif callable(value) or is_dataclass(value):
        opened = (type(value), dict(getattr(value, "__dict__", {})))
    yield from (_describe(each, deep) for each in opened)


def _code(code: CodeType) -> str:
    """Return a digest of what code does, not of where it stands."""

    def constant(value: Any) -> str:
        if isinstance(value, CodeType):
            return _code(value)
        is_set = isinstance(value, frozenset)  # whose order changes from process to process
        return repr(sorted(map(repr, value)) if is_set else value)

    return _digest([code.co_code.hex(), repr(code.co_names), *map(constant, code.co_consts)])
