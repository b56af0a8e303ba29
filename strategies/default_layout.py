"""What a forward would do to its tensors if all of them lay in memory in the default order.

`reshape`, `flatten` and `contiguous` return a view or a copy, depending on that order, so that a
write in place reaches what they were given, or does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.errors import Unsupported

from .calls import storage_of

# Keys of the memory that a tensor has, and that it would have in the default order.
_Memory: TypeAlias = tuple[Any, Any]

_OVERWRITES = {"copy_", "fill_", "zero_"}
"""What gives each element of its first tensor another value, whatever it was."""

_TELLS_VALUES = {
    *("__array__", "__bool__", "__complex__", "__contains__", "__dlpack__", "__float__"),
    *("__index__", "__int__", "__reduce_ex__", "allclose", "equal", "is_nonzero", "item"),
    *("numpy", "tolist"),
}
"""What reads values and returns no tensor; all others of that kind tell a shape or a type."""


def in_order(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return a tensor in another order; `DefaultLayout` takes it to be as it was."""
    if has_torch_function_unary(
        None
    ):  # a mode is on; a strict subclass does not know this function
        reordered: Tensor = handle_torch_function(in_order, (), tensor, memory_format)
        return reordered
    return tensor.contiguous(memory_format=memory_format)


def _in_default_order(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    return tensor


class DefaultLayout(TorchFunctionMode):
    """Repeat each call of torch on meta tensors in the default order, and refuse what would differ.

    Where two tensors share memory in one of the orders only, neither may be read after a write to
    the other. What torch cannot run on the meta device, and compiled code, is not followed.

    Args:
        setting: that changed the order, for the refusal.
    """

    def __init__(self, setting: str) -> None:
        super().__init__()
        self._setting, self._call = setting, 0
        # Tensor -> one that lies as it would by default, and the number of the call that made it
        self._twins: Any = WeakTensorKeyDictionary()
        self._writes: dict[_Memory, tuple[int, str]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run what was called, and repeat it.

        Raises:
            Unsupported: it reads what would have other values in the default order.
        """
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        tensors = _tensors_in((args, kwargs))
        followed = [each for each in tensors if each in self._twins]
        if not followed and func is not in_order:
            return func(*args, **kwargs)
        self._call += 1
        with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse what is asked of it
            versions = [each._version for each in followed]
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            self._check(func, tensors, result)
            for each, version in zip(followed, versions, strict=True):
                if each._version != version:
                    self._writes[self._memory(each)] = self._call, _name_of(func)
            self._follow(func, args, kwargs, tensors, _tensors_in(result))
        return result

    def _follow(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        """Take in what a call made, and what that would be in the default order."""
        others = {None, *(storage_of(each) for each in inputs if each not in self._twins)}
        default = _in_default_order if func is in_order else func
        repeated = self._repeated(default, args, kwargs, results)
        for each, twin in zip(results, repeated, strict=False):
            is_same = each.shape == twin.shape and not each.is_inference()
            if is_same and storage_of(each) not in others:
                self._twins[each] = _of_type(twin, each.dtype), self._call

    def _repeated(
        self, func: Any, args: Any, kwargs: Any, results: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the tensors that a call makes in the default order; [] where that fails.

        Autocast leaves meta tensors alone: where types do not fit, all have that of the result.
        """
        for dtype in (None, *{each.dtype for each in results}):

            def twin(tensor: Tensor, dtype: torch.dtype | None = dtype) -> Tensor:
                kept: Tensor = self._twins.get(tensor, (_empty(tensor, tensor.dtype),))[0]
                return _of_type(kept, dtype) if dtype and kept.is_floating_point() else kept

            try:
                with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
                    on_meta = pytree.tree_map_only(Tensor, twin, (args, kwargs))
                    return _tensors_in(func(*on_meta[0], **on_meta[1]))
            except Exception:
                continue
        return []

    def _memory(self, tensor: Tensor) -> _Memory:
        return storage_of(tensor), storage_of(self._twins[tensor][0])

    def _check(self, func: Any, tensors: list[Tensor], result: Any) -> None:
        reader = _name_of(func)
        for tensor in _read_by(reader, tensors, result):
            if tensor not in self._twins:
                continue
            twin, made_in = self._twins[tensor]
            if reader in ("as_strided", "as_strided_") and twin.stride() != tensor.stride():
                raise Unsupported(
                    f"{self._setting}: {reader} counts elements in memory, where they lie in "
                    "another order: index or permute the tensor, or leave the setting out"
                )
            real, default = self._memory(tensor)
            for (its_real, its_default), (call, writer) in self._writes.items():
                if made_in < call and (real == its_real) != (default == its_default):
                    raise Unsupported(
                        f"{self._setting}: what {writer} wrote in place and what {reader} reads "
                        "share memory in one of the two orders only, since reshape, flatten and "
                        "contiguous return a view in one and a copy in the other: write to the "
                        "tensor itself, or to a clone() of it, or leave the setting out"
                    )


def _name_of(func: Any) -> str:
    if func is in_order:
        return "the next convolution"
    name: str = getattr(func, "__name__", str(func))
    return name


def _read_by(name: str, tensors: list[Tensor], result: Any) -> list[Tensor]:
    """Return the tensors of which a call reads more than the shape and the type."""
    tells_values = name in _TELLS_VALUES or result is None or _tensors_in(result)
    if not tells_values or name.endswith("_like") or name.startswith("new_"):
        return []
    if name in _OVERWRITES:
        return tensors[1:]
    return tensors[:1] if name.endswith("_as") else tensors


def _tensors_in(value: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")


def _of_type(twin: Tensor, dtype: torch.dtype) -> Tensor:
    return twin if twin.dtype == dtype else _empty(twin, dtype)
