"""CUDA's autocast for meta tensors: which operators run in which type, and the cache of casts.

Follows ATen/autocast_mode.cpp. An operator that the dispatcher knows to have an autocast kernel on
CUDA has one of these policies; those that are named in no list here take float32, so that an
operator added by a later PyTorch falls into the largest group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.prediction.cuda.dispatch import beneath, emulate


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER = _names(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
    cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    """
)
_FLOAT32_RESULT = _names(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
_WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
_NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
_REFUSED = _names("binary_cross_entropy")
_ELSEWHERE = _names(
    "scaled_dot_product_attention rms_norm softmax.int log_softmax.int lstm_cell gru_cell"
)
"""Cast by whoever emulates them for other reasons too."""

_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""id of a weight -> the weight, which the cast keeps alive as in C++, and its cast."""


def is_on() -> bool:
    """Whether CUDA's autocast is enabled here."""
    return bool(torch.is_autocast_enabled("cuda"))


def in_lower_precision(value: Any) -> Any:
    """The value with its eligible tensors cast to autocast's type, leaf weights cast once."""
    return _cast(value, torch.get_autocast_dtype("cuda"))


def in_float32(value: Any) -> Any:
    """The value with its eligible tensors cast to float32."""
    return _cast(value, torch.float32)


@contextmanager
def cast_cache() -> Iterator[None]:
    """Forget casts where autocast does: where its outermost region is left, and when asked to."""
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _casts.clear()
        clear()

    torch.clear_autocast_cache = clear_both
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear
        _casts.clear()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return _cast_tensor(value, dtype)
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(item, dtype) for item in value])
    return value


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not _eligible(tensor) or tensor.dtype == dtype:
        return tensor
    cacheable = (
        dtype == torch.get_autocast_dtype("cuda")
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not cacheable:
        return tensor.to(dtype)
    if id(tensor) not in _casts:
        _casts[id(tensor)] = tensor, tensor.to(dtype)
    return _casts[id(tensor)][1]


def _eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and tensor.is_floating_point() and tensor.dtype != torch.float64


def _lower(op: Any, args: Any, kwargs: Any) -> Any:
    return _called_in(torch.get_autocast_dtype("cuda"), op, args, kwargs)


def _float32(op: Any, args: Any, kwargs: Any) -> Any:
    return _called_in(torch.float32, op, args, kwargs)


def _called_in(dtype: torch.dtype, op: Any, args: Any, kwargs: Any) -> Any:
    """The last argument is cast first, as compiled C++ does: recorded trainings show it."""
    named = {name: _cast(arg, dtype) for name, arg in reversed(kwargs.items())}
    return op(*[_cast(arg, dtype) for arg in reversed(args)][::-1], **named)


def _float32_result(op: Any, args: Any, kwargs: Any) -> Any:
    """Ask for a float32 result, unless the caller asked for a type."""
    first = args[0]
    if not _eligible(first) or kwargs.get("dtype") is not None:
        return op(*args, **kwargs)
    position = [argument.name for argument in op._schema.arguments].index("dtype")
    if len(args) > position and args[position] is not None:
        return op(*args, **kwargs)
    return op(*args[:position], **kwargs | {"dtype": torch.float32})


def _widest(op: Any, args: Any, kwargs: Any) -> Any:
    """All in float32 if one eligible tensor is, else in the lower type."""
    floating = [tensor for tensor in _tensors(args) if _eligible(tensor)]
    wide = any(tensor.dtype == torch.float32 for tensor in floating)
    return (_float32 if wide else _lower)(op, args, kwargs)


def _norm(op: Any, args: Any, kwargs: Any) -> Any:
    """A norm whose sum is taken in float32, by the variant that has a `dtype`."""
    if not _eligible(args[0]):
        return op(*args, **kwargs)
    variant = _overload(_NORMS[op._schema.name.split("::")[1] + "." + op._overloadname])
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    given.setdefault("p", 2)
    return variant(**given, dtype=torch.float32)


def _refused(op: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        f"{op} is unsafe to autocast: use binary_cross_entropy_with_logits (CUDA refuses it too)"
    )


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _policy(name: str) -> Callable[[Any, Any, Any], Any]:
    if name in _LOWER:
        return _lower
    if name in _FLOAT32_RESULT:
        return _float32_result
    if name in _WIDEST:
        return _widest
    if name in _NORMS:
        return _norm
    return _refused if name in _REFUSED else _float32


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _kernel(name: str) -> Callable[..., Any]:
    op, policy = _overload(name), _policy(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not is_on():
            with beneath():
                return op(*args, **kwargs)
        with beneath():
            return policy(op, args, kwargs)

    return kernel


def _register() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        short = name.removeprefix("aten::")
        if short == name or short in _ELSEWHERE:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"):
            emulate(short, _kernel(short))


_register()
