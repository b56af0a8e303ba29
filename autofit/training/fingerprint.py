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
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import filterfalse
from types import BuiltinFunctionType, CellType, CodeType
from typing import Any

import torch

from autofit.devices.base import Environment
from autofit.memory.allocator import configured
from autofit.training.batch import describe
from autofit.training.optimizers import Optimizers, by_name
from autofit.training.samples import Made
from autofit.training.workload import Workload

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NOT_ABOUT_COST = {"lr", "initial_lr"}
_SIMPLE = {bool, int, str, bytes, type(None)}
_PLAIN = (*_SIMPLE, float, range, slice, Enum, torch.dtype, torch.device)
# Objects opened for one set: a set of so many takes about a second, as when its elements reach each
# other. Each element has an equal share, so that none depends on another.
_OPENED_OF_A_SET = 100_000
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_ONLY_ON_THE_CPU = {"torch.num_threads"}
# Environment variables that change how torch and CUDA allocate and compute.
_ABOUT_COST = (
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
            [configured()[1], *map(os.environ.get, _ABOUT_COST)],
        ),
    }
    return ";".join(f"{name}={_Walk({}, math.inf).digest(part)}" for name, part in parts.items())


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


class _Walk:
    """A walk over a value and its parts, which says what they are in every process alike.

    An object that was met before is replaced by its number: a shared tensor, or code that reaches
    itself.

    Args:
        known: numbers of what an outer walk met, and the objects, by their ids.
        limit: of the objects that are opened; values are opened beyond it.
    """

    def __init__(self, known: Mapping[int, tuple[int, Any]], limit: float) -> None:
        self._known, self._limit = known, limit
        self._met: dict[int, tuple[int, Any]] = {}  # holds the objects, so that ids stay theirs

    def digest(self, value: Any) -> str:
        digest, left = hashlib.sha256(), [value]  # a list, since Python's stack is short
        while left:
            text, parts = self._described(left.pop())
            lines = [f"{text} {len(parts)}"]
            if _SIMPLE.issuperset(map(type, parts)):  # at once: a vocabulary has many thousands
                lines += map(repr, parts)
            else:
                left += parts[::-1]
            digest.update("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        return digest.hexdigest()[:12]

    def _described(self, value: Any) -> tuple[str, Sequence[Any]]:
        """Return the text of a value and its parts; those of an object only the first time."""
        if type(value) is tuple:  # as there are in a vocabulary
            return "builtins.tuple", value
        text = _text(value)
        if isinstance(value, _PLAIN):
            return text, ()
        if isinstance(value, tuple | frozenset):
            return text, self._opened(value)
        if found := self._known.get(id(value)) or self._met.get(id(value)):
            return f"{found[0]} {text}", ()
        is_opened, number = len(self._met) < self._limit, len(self._known) + len(self._met)
        self._met[id(value)] = number, value
        return f"{number} {text}", self._opened(value) if is_opened else ()

    def _opened(self, value: Any) -> Sequence[Any]:
        if isinstance(value, set | frozenset):
            return self._elements(value)
        return list(_parts(value))

    def _elements(self, values: Collection[Any]) -> Sequence[str]:
        """Return the plain elements as one text, and digests of the others, both sorted.

        The order of a set changes from process to process, so each element is walked alone: it may
        not depend on what came before it. An object in a set that such a walk meets is told by its
        class, and a set in it not at all: blocks that hold sets of each other would be told in
        every order there is.
        """
        if not self._limit:
            return ()
        plain = [each for each in values if isinstance(each, _PLAIN)]
        others = [each for each in values if not isinstance(each, _PLAIN)]
        is_outermost = self._limit == math.inf
        known = self._met if is_outermost else self._known
        limit = max(1, _OPENED_OF_A_SET // max(1, len(others))) if is_outermost else 0
        digests = (_Walk(known, limit).digest(each) for each in others)
        return ["\n".join(sorted(map(_text, plain))), *sorted(digests)]


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
