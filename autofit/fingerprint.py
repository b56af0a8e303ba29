"""A workload's fingerprint: equal for trainings that cost the same, different where they may not.

It covers module classes and their settings, forward code, parameters and buffers (shape, dtype,
requires_grad), the sample batch's shapes and dtypes, optimizer and its options, the loss functions'
code, the global batch, torch and the device. It leaves out values: weights, learning rates, data.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import torch

from autofit.batching import describe
from autofit.devices.base import Environment
from autofit.workload import Optimizers, Workload

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NOT_ABOUT_COST = {"params", "lr", "initial_lr"}


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
    for name, module in model.named_modules():
        yield f"module {name} {_class_name(module)} {_ADDRESS.sub('', module.extra_repr())}"
        yield f"training {module.training} forward {_describe_function(module.forward)}"
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


def _describe_function(function: Any) -> str:
    """A function's code and name; a callable object by its class, a partial by its parts."""
    if function is None:
        return "none"
    if isinstance(function, functools.partial):
        inner = _describe_function(function.func)
        return _ADDRESS.sub("", f"partial {inner} {function.args} {function.keywords}")
    if isinstance(function, torch.nn.Module):
        return _ADDRESS.sub("", repr(function))
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        return f"{function.__qualname__} {'/'.join(_code_parts(code))}"
    return _class_name(function)


def _code_parts(code: CodeType) -> Iterator[str]:
    yield hashlib.sha256(code.co_code).hexdigest()[:16]
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        elif not isinstance(constant, frozenset):  # a set's order changes from process to process
            yield repr(constant)
