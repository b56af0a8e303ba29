"""A workload's fingerprint: equal for trainings that cost the same, different where they may not.

It covers module classes, their code, hooks and plain attributes, parameters and buffers (shape,
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
from types import BuiltinFunctionType, CellType, CodeType
from typing import Any

import torch

from autofit.devices.base import Environment
from autofit.training.batch import describe
from autofit.training.optimizers import Optimizers, by_name
from autofit.training.samples import Made
from autofit.training.workload import Workload

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NOT_ABOUT_COST = {"params", "lr", "initial_lr"}
_PLAIN = (bool, int, str, type(None), torch.dtype)
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
_MOST_DEEP = 4


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
    recipe = workload.recipe
    for name in ("loss_fn", "criterion", "loss_weight", "before_step", "training_step"):
        yield f"{name} {_describe(getattr(recipe, name))}"
    yield f"collate_fn {_describe(workload.collate_fn)}"
    yield f"clip {recipe.clip_grad_norm is not None}"
    if workload.eval_samples is not None:
        evaluated = describe(workload.evaluation_batch(workload.eval_samples))
        yield f"eval_step {_describe(workload.eval_step)} {evaluated}"


def _model_lines(model: torch.nn.Module) -> Iterator[str]:
    yield from _structure_lines(model)
    for module in model.modules():  # instance attributes that override the class
        yield f"forward {_describe(vars(module).get('forward'))}"
        for hooks in _HOOKS:
            yield f"hooks {[_describe(hook) for hook in vars(module).get(hooks, {}).values()]}"


def _structure_lines(model: torch.nn.Module, deep: int = 0) -> Iterator[str]:
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        yield from _class_lines(kind, deep)
    for name, module in model.named_modules():
        yield f"module {name} {_name(type(module))} {_ADDRESS.sub('', module.extra_repr())}"
        plain = {key: _describe_plain(value) for key, value in sorted(vars(module).items())}
        public = {key: text for key, text in plain.items() if text and not key.startswith("_")}
        yield f"attributes {public}"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"parameter {name} {_describe_tensor(parameter)} {parameter.requires_grad}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"buffer {name} {_describe_tensor(buffer)}"
    shared: dict[int, int] = {}
    order = [
        shared.setdefault(id(parameter), len(shared))
        for _, parameter in model.named_parameters(remove_duplicate=False)
    ]
    yield f"shared {order}"


def _class_lines(kind: type, deep: int) -> Iterator[str]:
    """Yield the code of a class and its bases, up to torch's own."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in ("torch", "builtins"):
            break
        for name, member in sorted(vars(each).items()):
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(getattr(function, "__code__", None), CodeType):
                yield f"method {each.__qualname__}.{name} {_describe(function, deep)}"


def _describe_plain(value: Any) -> str | None:
    """Return a plain value as text (a float only as zero or not); None: it is not plain."""
    if isinstance(value, float):
        return "some float" if value else "0.0"
    if isinstance(value, (tuple, list)):
        parts = [_describe_plain(part) for part in value]
        return None if None in parts else repr(parts)
    return repr(value) if isinstance(value, _PLAIN) else None


def _optimizer_lines(optimizer: Optimizers) -> Iterator[str]:
    for name, one in by_name(optimizer).items():
        yield from _class_lines(type(one), 0)
        for group in one.param_groups:
            options = {key: _describe(group[key]) for key in sorted(set(group) - _NOT_ABOUT_COST)}
            sizes = [_describe_tensor(parameter) for parameter in group["params"]]
            yield f"optimizer {name} {_name(type(one))} {options} {sizes}"


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"


def _name(kind: Any) -> str:
    """Return the name of a class or function, with its module where that is torch."""
    home = getattr(kind, "__module__", None) or "builtins"
    own = home.partition(".")[0] in ("torch", "builtins")
    return f"{home}.{kind.__qualname__}" if own else str(kind.__qualname__)


def _describe(value: Any, deep: int = 0) -> str:
    """Describe a function by code, defaults and closure, a container by parts, else the class."""
    if (plain := _describe_plain(value)) is not None:
        return plain
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, type | BuiltinFunctionType):
        return _name(value)
    parts = None if deep == _MOST_DEEP else _parts(value, deep + 1)
    return _name(type(value)) if parts is None else f"{_name(type(value))} {list(parts)}"


def _parts(value: Any, deep: int) -> Iterable[str] | None:
    """Describe the parts of a value; None: it is described by its class alone."""
    if isinstance(value, torch.nn.Module):
        return _structure_lines(value, deep)
    if isinstance(value, functools.partial):
        return _described([value.func, *value.args, value.keywords], deep)
    if isinstance(value, (tuple, list)):
        return _described(value, deep)
    if isinstance(value, dict):
        return _described([*value, *value.values()], deep)
    if isinstance(code := getattr(value, "__code__", None), CodeType):
        beside = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        filled = [cell for cell in value.__closure__ or () if cell != CellType()]
        beside += [cell.cell_contents for cell in filled]
        return [value.__qualname__, *_code_parts(code), *_described(beside, deep)]
    if callable(value):
        attributes = dict(getattr(value, "__dict__", {}))
        return [*_class_lines(type(value), deep), _describe(attributes, deep)]
    return None


def _described(values: Iterable[Any], deep: int) -> list[str]:
    return [_describe(value, deep) for value in values]


def _code_parts(code: CodeType) -> Iterator[str]:
    yield hashlib.sha256(code.co_code).hexdigest()[:16]
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        elif isinstance(constant, frozenset):  # a set's order changes from process to process
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)
