"""CUDA's autocast for meta tensors: the type each operator runs in, and the cache of casts.

Follows ATen/autocast_mode.cpp. Each operator that has an autocast kernel on CUDA gets the policy of
the list that names it; operators in no list run in float32, the policy of most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from autofit.errors import PredictionUnavailable

_UNUSED = {"AutocastIPU": "ipu", "AutocastHPU": "hpu"}


@cache
def spare_key() -> tuple[str, str, Any]:
    """Return the key of the emulation: autocast's for a device that no build has kernels for.

    Returns:
        The name, the device and the key of the first that this torch has.

    Raises:
        PredictionUnavailable: it has none.
    """
    for name, device in _UNUSED.items():
        if (key := getattr(torch._C.DispatchKey, name, None)) is not None:
            return name, device, key
    raise PredictionUnavailable(
        f"memory cannot be predicted with torch {torch.__version__}: torch._C.DispatchKey has none "
        f"of {', '.join(_UNUSED)}. Probes do not depend on this"
    )


def beneath() -> AbstractContextManager[None]:
    """Run operators without emulation inside, so that a kernel does not call itself."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(spare_key()[2])
    )
    return guard


def is_on() -> bool:
    """Return whether autocast is enabled for CUDA."""
    return bool(torch.is_autocast_enabled("cuda"))


def lowered(value: Any) -> Any:
    """Return the value with eligible tensors in autocast's type where it is on.

    Leaf weights are cast once.
    """
    return cast(value, torch.get_autocast_dtype("cuda")) if is_on() else value


@contextmanager
def cast_cache() -> Iterator[None]:
    """Clear cached casts when autocast does: as its outermost region ends, and on request."""
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


def kernels() -> dict[str, Callable[..., Any]]:
    """Return a kernel by name for each operator that has an autocast kernel on CUDA."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "AutocastCUDA")
    )
    return {name: _kernel(name) for name in names}


# By id of a weight: the weight, which stays alive as in C++, and its cast.
_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the value with eligible tensors in a type."""
    if isinstance(value, torch.Tensor):
        return _cast_tensor(value, dtype)
    if isinstance(value, (list, tuple)):
        return type(value)([cast(item, dtype) for item in value])
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


def _kernel(name: str) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    policy = POLICIES.get(name, _float32)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        enabled = is_on()
        with beneath():
            return policy(op, args, kwargs) if enabled else op(*args, **kwargs)

    return kernel


def _lower(op: Any, args: Any, kwargs: Any) -> Any:
    return _called_in(torch.get_autocast_dtype("cuda"), op, args, kwargs)


def _float32(op: Any, args: Any, kwargs: Any) -> Any:
    return _called_in(torch.float32, op, args, kwargs)


def _called_in(dtype: torch.dtype, op: Any, args: Any, kwargs: Any) -> Any:
    # The last argument is cast first, as compiled C++ does: recorded trainings show it.
    named = {name: cast(arg, dtype) for name, arg in reversed(kwargs.items())}
    return op(*[cast(arg, dtype) for arg in reversed(args)][::-1], **named)


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
    """Run in float32 if one eligible tensor has it, else in the lower type."""
    flat = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
    tensors = [part for part in flat if isinstance(part, torch.Tensor) and _eligible(part)]
    wide = any(tensor.dtype == torch.float32 for tensor in tensors)
    return (_float32 if wide else _lower)(op, args, kwargs)


def _refused(op: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        f"{op} is unsafe to autocast: use binary_cross_entropy_with_logits (CUDA refuses it too)"
    )


_LOWER = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
    cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
"""
_FLOAT32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
# By operator; those that are not listed run in float32.
POLICIES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "binary_cross_entropy": _refused,
    **dict.fromkeys(_LOWER.split(), _lower),
    **dict.fromkeys(_FLOAT32_RESULT.split(), _float32_result),
    **dict.fromkeys(_WIDEST.split(), _widest),
}
