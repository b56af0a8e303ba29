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

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
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
_BY_VALUE = (*_PLAIN, float, tuple, frozenset)  # which of them is met again means nothing
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
    kind = environment.device.partition(":")[0]
    flags = _sorted(computing, but=() if kind == "cpu" else _ONLY_ON_THE_CPU)
    parts: dict[str, Any] = {
        "model": model,
        "samples": (workload.global_batch, workload.sample_batch_size, *_shapes(workload)),
        "optimizer": {
            name: (type(one), [_sorted(group, but=_NOT_ABOUT_COST) for group in one.param_groups])
            for name, one in by_name(optimizer).items()
        },
        "functions": (
            *(getattr(workload, name) for name in _FUNCTIONS),
            workload.clip_grad_norm is not None,
            workload.eval_samples and describe(workload.evaluation_batch(workload.eval_samples)),
        ),
        "torch": environment.torch,
        "device": (kind, environment.gpu),
        "flags": (
            {name: repr(value) for name, value in flags.items()},
            [os.environ.get(name) for name in _ABOUT_COST],
        ),
    }
    return ";".join(f"{name}={_digest(part)}" for name, part in parts.items())


def differing_parts(one: str, other: str) -> tuple[str, ...]:
    """Return the names of the parts in which two fingerprints differ."""
    differing = sorted({*one.split(";")} ^ {*other.split(";")})
    return tuple(dict.fromkeys(part.partition("=")[0] for part in differing))


def _shapes(workload: Workload) -> Iterator[Any]:
    """Yield shares and shapes of each length; of batches that may have other shapes, the types."""
    for share, batch in workload.mix(workload.described_size):
        shapes = describe(batch)
        if isinstance(workload.samples, Made):
            shapes = {name: text.partition("[")[0] for name, text in shapes.items()}
        yield repr(share), shapes


def _sorted(values: Mapping[str, Any], *, but: Collection[str]) -> dict[str, Any]:
    return {name: values[name] for name in sorted(values) if name not in but}


def _digest(value: Any) -> str:
    """Return a digest of what a value is that is the same in every process.

    What was met before is told by its number: shared tensors, and code that reaches itself.
    """
    digest = hashlib.sha256()
    met: dict[int, tuple[int, Any]] = {}

    def add(value: Any) -> None:
        text, parts = _text(value), list(_parts(value))
        if not isinstance(value, _BY_VALUE):
            parts = [] if id(value) in met else parts
            number, _ = met.setdefault(id(value), (len(met), value))
            text = f"{number} {text}"
        digest.update(f"{text} {len(parts)}\n".encode(errors="backslashreplace"))
        for part in parts:
            add(part)

    add(value)
    return digest.hexdigest()[:12]


def _is_torchs(kind: Any) -> bool:
    return str(kind.__module__ or "builtins").partition(".")[0] in ("torch", "builtins")


def _text(value: Any) -> str:
    """Return a plain value, or the name of a class, with its module where that is torch."""
    if isinstance(value, float):
        return "some float" if value else "0.0"
    if isinstance(value, _PLAIN):
        return repr(value)
    kind = value if isinstance(value, type | BuiltinFunctionType) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}" if _is_torchs(kind) else kind.__qualname__


def _parts(value: Any) -> Iterable[Any]:
    """Return what describes a value beside its class."""
    match value:
        case torch.Tensor():
            return value.dtype, tuple(value.shape), str(value.layout), value.requires_grad
        case torch.nn.Module():
            return _parts_of_module(value)
        case partial():
            return value.func, value.args, value.keywords
        case dict():
            return *value, *value.values()
        case tuple() | list():
            return value
        case set() | frozenset():  # whose order changes from process to process
            return sorted(map(_digest, value))
        case type():  # its code and that of its bases, but for torch's own
            bases = filterfalse(_is_torchs, value.__mro__)
            return [(each.__qualname__, _functions(each)) for each in bases]
        case CodeType():  # what it does, not where it stands; a float decides sizes now and then
            opened = (CodeType, frozenset)
            constants = (
                each if isinstance(each, opened) else repr(each) for each in value.co_consts
            )
            return value.co_code, value.co_names, *constants
    if isinstance(getattr(value, "__code__", None), CodeType):
        return _parts_of_function(value)
    is_opened = (callable(value) or is_dataclass(value)) and not isinstance(
        value, BuiltinFunctionType
    )
    return (type(value), dict(getattr(value, "__dict__", {}))) if is_opened else ()


def _parts_of_module(module: torch.nn.Module) -> Iterator[Any]:
    own = vars(module)  # with a forward of its own, if it has one
    yield type(module), _ADDRESS.sub("", module.extra_repr())
    yield _sorted(own, but=[key for key in own if key.startswith("_")])
    yield [list(own.get(each, {}).values()) for each in _HOOKS]
    for named in (module.named_parameters, module.named_buffers):
        yield dict(named(recurse=False, remove_duplicate=False))
    yield dict(module._modules.items())


def _functions(kind: type) -> dict[str, Any]:
    members = sorted(vars(kind).items())
    functions = {name: getattr(m, "__func__", getattr(m, "fget", m)) for name, m in members}
    return {name: each for name, each in functions.items() if hasattr(each, "__code__")}


def _parts_of_function(function: Any) -> Iterator[Any]:
    code, owner = function.__code__, getattr(function, "__self__", None)
    yield from (function.__qualname__, code, function.__defaults__, function.__kwdefaults__)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        yield None if name == "__class__" or cell == CellType() else cell.cell_contents
    if not isinstance(owner, torch.nn.Module | type):  # of a bound method
        yield getattr(owner, "__dict__", None)
