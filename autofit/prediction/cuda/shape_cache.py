"""A cache of what operators return on the meta device.

Most of a dry run's time goes into shape functions that PyTorch has in Python (normalizations,
activations), which layers and steps call again with arguments that look alike. The result follows
from the arguments' shapes, strides and types, so it is kept for operators that make new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch

from autofit.memory.tracer import tensors_in

_Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a tensor."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.memory_format, torch.layout)


class _CannotBeKept(Exception):
    """More than shapes may decide on the result."""


class ShapeCache:
    """Remembers results of operators."""

    def __init__(self) -> None:
        self._looks: dict[Hashable, tuple[Any, list[_Look | None]]] = {}

    def result(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Return what `run(func, args, kwargs)` returns, or new tensors that look the same."""
        if not _makes_new_tensors(func):
            return run(func, args, kwargs)
        try:
            named = tuple((name, _key(value)) for name, value in kwargs.items())
            key = func, torch.get_default_dtype(), tuple(map(_key, args)), named
        except _CannotBeKept:
            return run(func, args, kwargs)
        if (known := self._looks.get(key)) is not None:
            kind, looks = known
            made = [None if look is None else _empty(look) for look in looks]
            return kind(made) if kind is not None else made[0]
        result = run(func, args, kwargs)
        several = isinstance(result, (tuple, list))
        tensors = list(result) if several else [result]
        if _are_new([tensor for tensor in tensors if tensor is not None], (args, kwargs)):
            looks = [None if tensor is None else _look(tensor) for tensor in tensors]
            self._looks[key] = type(result) if several else None, looks
        return result


@cache
def _makes_new_tensors(func: Any) -> bool:
    returned = func._schema.returns
    aliases = [value.alias_info for value in returned if value.alias_info is not None]
    return bool(returned) and not func._schema.is_mutable and not aliases


def _key(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if type(value) not in _PLAIN or not _is_simple(value):
            raise _CannotBeKept
        return _look(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, torch.device):
        return str(value)
    if type(value) in _SCALARS:
        return type(value), value
    raise _CannotBeKept


def _is_simple(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and tensor.layout is torch.strided and not tensor.is_complex()


def _are_new(results: list[Any], given: Any) -> bool:
    """Return whether each result is all of a storage of its own.

    The schema does not tell: that of `_unsafe_view` names no alias.
    """
    if not all(type(each) is torch.Tensor and _is_simple(each) for each in results):
        return False
    storages = [tensor.untyped_storage() for tensor in (*results, *tensors_in(given))]
    own = storages[: len(results)]
    whole = all(storage.nbytes() == each.nbytes for storage, each in zip(own, results, strict=True))
    others = [storage._cdata for storage in storages[len(results) :]]
    return whole and len({each._cdata for each in own} - {*others}) == len(own)


def _look(tensor: torch.Tensor) -> _Look:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _empty(look: _Look) -> torch.Tensor:
    shape, strides, dtype = look
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
