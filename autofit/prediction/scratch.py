"""What CUDA kernels allocate for themselves while an operator runs, by operator.

A tensor trace sees what operators return. Kernels also take buffers that are gone when they
return: partial sums, copies of arguments that are not contiguous, sorted indices. Each rule gives
the sizes in the order of allocation and names the source it follows; an operator without a rule
takes nothing. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import torch

from autofit.prediction.gpus import Gpu
from autofit.prediction.reductions import Reduction, scratch_of_reduction

Rule: TypeAlias = Callable[[Any, Any, Gpu], list[int]]
"""(arguments by position, result, GPU) -> sizes."""


def scratch_bytes(name: str, args: Any, result: Any, gpu: Gpu) -> list[int]:
    """The scratch memory of one call of the operator `aten::<name>`."""
    copies = [
        _bytes(args[at])
        for at in _MADE_CONTIGUOUS.get(name, ())
        if at < len(args) and isinstance(args[at], torch.Tensor) and not _dense(args[at])
    ]
    rule = _RULES.get(name)
    return copies + (rule(args, result, gpu) if rule else [])


def _bytes(tensor: torch.Tensor, item: int | None = None) -> int:
    return tensor.numel() * (item or tensor.element_size())


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


_MADE_CONTIGUOUS = {
    "native_layer_norm": (0,),
    "native_layer_norm_backward": (0, 1),
    "_fused_rms_norm": (0,),
    "_fused_rms_norm_backward": (0, 1),
    "_softmax": (0,),
    "_log_softmax": (0,),
    "_softmax_backward_data": (0, 1),
    "_log_softmax_backward_data": (0, 1),
    "native_group_norm": (0,),
    "native_group_norm_backward": (0, 1),
    "nll_loss_forward": (0,),
    "nll_loss_backward": (1,),
    "upsample_nearest2d": (0,),
    "upsample_bilinear2d": (0,),
    "upsample_bicubic2d": (0,),
    "upsample_nearest2d_backward": (0,),
    "upsample_bilinear2d_backward": (0,),
    "upsample_bicubic2d_backward": (0,),
    "max_pool2d_with_indices": (0,),
    "max_pool2d_with_indices_backward": (0,),
    "avg_pool2d": (0,),
    "avg_pool2d_backward": (0,),
    "embedding": (1,),
    "embedding_dense_backward": (0, 1),
}
"""Operators whose kernels call `contiguous()` on an argument, and which."""


def _reduction(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """sum, mean, norms: Reduce.cuh."""
    tensor = args[0]
    reduced = _reduced_dims(tensor, result)
    if not tensor.numel():
        return []
    accumulator = 8 if tensor.dtype in (torch.float64, torch.int64) else 4
    return scratch_of_reduction(
        Reduction(tuple(tensor.shape), tensor.stride(), reduced, accumulator), gpu
    )


def _reduced_dims(tensor: torch.Tensor, result: torch.Tensor) -> frozenset[int]:
    """Which dimensions went, told from the shapes: those kept are matched from the last on."""
    if result.dim() == tensor.dim():
        pairs = enumerate(zip(tensor.shape, result.shape, strict=True))
        return frozenset(at for at, (before, after) in pairs if before != after)
    kept = list(result.shape)
    reduced = set()
    for at in range(tensor.dim() - 1, -1, -1):
        if kept and kept[-1] == tensor.shape[at] and len(kept) <= at + 1:
            kept.pop()
        else:
            reduced.add(at)
    return frozenset(reduced)


def _lstm_cell_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """The gradient of the bias is a sum of the gates' (RNN.cu)."""
    return _reduction((result[0],), result[2], gpu) if result[2] is not None else []


def _gru_cell_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Likewise, of one product's gates and then of the other's; one at a time."""
    return _reduction((result[0],), result[3], gpu) if result[3] is not None else []


def _loss(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """The loss of each element, and a reduction of them (BinaryOps.cpp, Loss.cpp)."""
    if result.dim():
        return []
    elements = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
    return [_bytes(elements), *_reduction((elements,), result, gpu)]


def _loss_in_place(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """A reduction of the losses, which lie where the result will (cuda/Loss.cu)."""
    return [_bytes(result), *_loss(args, result, gpu)[1:]] if not result.dim() else []


def _loss_of_logits(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """The logarithms of all sigmoids, one weight each, and the loss of each element (Loss.cpp)."""
    weighted = len(args) > 3 and args[3] is not None
    return [_bytes(args[0])] * (1 + weighted) + _loss(args, result, gpu)


def _logsumexp(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """The exponentials (ReduceOps.cpp)."""
    return [_bytes(args[0])]


def _softmax_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """`grad * output` (SoftMax.cu)."""
    return [_bytes(args[0])]


def _embedding_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Sorted indices and partial sums by segments of at most 10 rows (Embedding.cu).

    From 3073 indices on; below that, one kernel adds in place. The radix sort's own buffer is
    its four arrays of indices.
    """
    indices, rows = args[1].numel(), args[2]
    if indices <= 3072:
        return []
    width = prod(args[0].shape[args[1].dim() :])
    segments = min(indices, rows)
    partial = indices // 10 + segments
    item = args[1].element_size()
    sorting = [item * indices] * 4
    return [*sorting, item * segments, item * segments, item * partial, 4 * partial * width]


def _cudnn_attention_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """cuDNN: float32 gradients of the queries, and a row of sums."""
    query = args[1]
    batch, heads, length, width = query.shape
    return [4 * batch * heads * length * (width + 1) + 256]


def _flash_attention_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Row sums, and float32 gradients of the queries, both padded (flash_api.cpp)."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rounded = -(-length // 128) * 128
    wide = -(-width // 32) * 32
    sizes = [4 * batch * heads * rounded, 4 * batch * heads * rounded * wide]
    if key.size(1) != heads:
        sizes += [2 * batch * heads * key.size(2) * width] * 2
    return sizes


def _efficient_attention_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Row sums of `grad * out`, and float32 gradients of the queries in blocks of 64.

    For float32 the row sums are computed before the kernel (attention_backward.cu).
    """
    query = args[1]
    batch, heads, length, width = query.shape
    rows = 4 * batch * heads * length
    blocks = -(-length // 64)
    accumulators = 4 * batch * heads * (blocks * 64 * (-(-width // 64) * 64) + 4 * blocks)
    if query.dtype != torch.float32:
        return [rows, accumulators]
    return [rows, rows * width, rows, accumulators]


def _group_norm(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """A scale and a shift for each sample and channel (group_norm_kernel.cu)."""
    return [4 * args[3] * args[4]] * 2


def _group_norm_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    samples, channels, groups = args[5], args[6], args[8]
    return [4 * samples * channels] * 3 + [4 * samples * groups] * 2


def _foreach_norm(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """A partial sum for each chunk of 65536 elements (ForeachReduceOp.cu)."""
    chunks = max((-(-tensor.numel() // 65536) for tensor in args[0]), default=0)
    return [4 * chunks * len(args[0])]


def _layer_norm_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Partial sums over rows, for very many and short rows (layer_norm_kernel.cu)."""
    width = prod(args[2])
    rows = args[1].numel() // max(width, 1)
    columns = -(-width // 32)
    if rows <= 64 * 1024 or columns >= gpu.multiprocessors // 2:
        return []
    parts = min(32 * 1024 // columns, rows // 32)
    return [4 * parts * width] * 2


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("sum", "mean", "linalg_vector_norm", "amax", "amin", "prod", "norm", "nansum"), _reduction
    ),
    **dict.fromkeys(
        ("mse_loss", "smooth_l1_loss", "huber_loss"),
        _loss,
    ),
    **dict.fromkeys(("binary_cross_entropy", "soft_margin_loss"), _loss_in_place),
    "binary_cross_entropy_with_logits": _loss_of_logits,
    "logsumexp": _logsumexp,
    "_softmax_backward_data": _softmax_backward,
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_cudnn_attention": lambda *_: [256],
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "_foreach_norm": _foreach_norm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
