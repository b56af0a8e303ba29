"""A workload's fingerprint: equal for trainings that cost the same, different where they may not.

It covers module classes, their code and plain attributes, parameters and buffers (shape, dtype,
requires_grad), the sample batch's shapes and dtypes, optimizer and its options, the loss functions'
code with their defaults and what they close over, the global batch, torch and the device. It leaves
out values: weights, learning rates, data. Functions that this code calls by name are not entered.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from types import CellType, CodeType
from typing import Any

import torch

from autofit.batching import describe
from autofit.devices.base import Environment
from autofit.workload import Optimizers, Workload

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NOT_ABOUT_COST = {"params", "lr", "initial_lr"}
_PLAIN = (bool, int, str, type(None), torch.dtype)
_MOST_FUNCTIONS_DEEP = 4


def fingerprint(
    workload: Workload, model: torch.nn.Module, optimizer: Optimizers, environment: Environment
) -> str:
    """A hex digest of everything above.

    Args:
        workload: its functions and its sample batch are read; nothing is run but a batch maker.
        model: the workload's model, built.
        optimizer: the workload's optimizer, built.
        environment: where it would train.
    """
    digest = hashlib.sha256()
    for line in _lines(workload, model, optimizer, environment):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:32]


def _lines(
    workload: Workload, model: torch.nn.Module, optimizer: Optimizers, environment: Environment
) -> Iterator[str]:
    yield f"torch {environment.torch} device {environment.device} {environment.gpu}"
    yield f"global batch {workload.global_batch} resplit {workload.allow_resplit}"
    size = workload.sample_batch_size
    yield f"sample {size} {describe(workload.batch(size))}"
    yield from _model_lines(model)
    yield from _optimizer_lines(optimizer)
    recipe = workload.recipe
    for name in ("loss_fn", "criterion", "loss_weight", "before_step", "train_step"):
        yield f"{name} {_describe_function(getattr(recipe, name))}"
    yield f"clip {recipe.clip_grad_norm is not None}"


def _model_lines(model: torch.nn.Module) -> Iterator[str]:
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        yield from _class_lines(kind)
    for name, module in model.named_modules():
        yield f"module {name} {_class_name(module)} {_ADDRESS.sub('', module.extra_repr())}"
        yield f"attributes {_plain_attributes(module)}"
        yield f"forward {_describe_function(vars(module).get('forward'))}"
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


def _class_lines(kind: type) -> Iterator[str]:
    """The code of a class and of those it comes from, up to torch's own."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in ("torch", "builtins"):
            break
        for name, member in sorted(vars(each).items()):
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(getattr(function, "__code__", None), CodeType):
                yield f"method {each.__qualname__}.{name} {_describe_function(function)}"


def _plain_attributes(module: torch.nn.Module) -> dict[str, str]:
    """Settings such as a number of repetitions or a flag; torch's bookkeeping is underscored."""
    described = {name: _describe_plain(value) for name, value in sorted(vars(module).items())}
    return {
        name: text
        for name, text in described.items()
        if text is not None and not name.startswith("_")
    }


def _describe_plain(value: Any) -> str | None:
    """A plain value as text, a float only as to whether it is zero; None: it is not plain."""
    if isinstance(value, float):
        return "some float" if value else "0.0"
    if isinstance(value, (tuple, list)):
        parts = [_describe_plain(part) for part in value]
        return None if None in parts else repr(parts)
    return repr(value) if isinstance(value, _PLAIN) else None


def _optimizer_lines(optimizer: Optimizers) -> Iterator[str]:
    named = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
    for name, one in named.items():
        for group in one.param_groups:
            options = {key: group[key] for key in sorted(set(group) - _NOT_ABOUT_COST)}
            sizes = [_describe_tensor(parameter) for parameter in group["params"]]
            yield f"optimizer {name} {_class_name(one)} {options} {sizes}"


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"


def _class_name(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def _describe_function(function: Any, deep: int = 0) -> str:
    """A function's code, defaults and closure; an object by its class, a partial by its parts."""
    if (plain := _describe_plain(function)) is not None:
        return plain
    if isinstance(function, functools.partial):
        inner = _describe_function(function.func, deep)
        return _ADDRESS.sub("", f"partial {inner} {function.args} {function.keywords}")
    if isinstance(function, torch.nn.Module):
        return _ADDRESS.sub("", repr(function))
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or deep == _MOST_FUNCTIONS_DEEP:
        return _class_name(function)
    beside = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    beside += [_contents(cell) for cell in function.__closure__ or ()]
    described = [_describe_function(value, deep + 1) for value in beside]
    return f"{function.__qualname__} {'/'.join(_code_parts(code))} {described}"


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is filled later, if ever
        return None


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
