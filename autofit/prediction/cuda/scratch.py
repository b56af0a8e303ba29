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

from autofit.prediction.cuda.attention import (
    cudnn_attention_backward,
    efficient_attention_backward,
    flash_attention_backward,
)
from autofit.prediction.cuda.reductions import Reduction, scratch_of_reduction
from autofit.prediction.gpus import Gpu

Rule: TypeAlias = Callable[[Any, Any, Gpu], list[int]]
"""(arguments by position, result, GPU) -> sizes."""


def scratch_bytes(name: str, args: Any, result: Any, gpu: Gpu) -> list[int]:
    """The scratch memory of one call of the operator `aten::<name>`."""
    copies = [
        _bytes(args[at])
        for at in _MADE_CONTIGUOUS.get(name, ())
        if at < len(args) and isinstance(args[at], torch.Tensor) and not _suits(name, args[at])
    ]
    rule = _RULES.get(name)
    return copies + (rule(args, result, gpu) if rule else [])


def _bytes(tensor: torch.Tensor, item: int | None = None) -> int:
    return tensor.numel() * (item or tensor.element_size())


def _suits(name: str, tensor: torch.Tensor) -> bool:
    """Whether a kernel takes a tensor as it lies: those of images also take channels last."""
    return tensor.is_contiguous() or (
        name.startswith(_OF_IMAGES)
        and tensor.dim() == 4
        and tensor.is_contiguous(memory_format=torch.channels_last)
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
_OF_IMAGES = ("upsample_", "max_pool2d", "avg_pool2d")


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


def _product(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Copies of matrices that cuBLAS cannot read: neither rows nor columns lie in one piece.

    So it is with the gradient of a sum, which is one number expanded. `prepare_matrix_for_cublas`
    of cuda/cuBlasCommonArgs.h, `prepare_batch_matrix_for_cublas` of cuda/Blas.cpp.
    """
    operands = args[1:3] if len(args) > 2 and isinstance(args[2], torch.Tensor) else args[:2]
    return [_bytes(matrix) for matrix in operands if not _has_lines(matrix)]


def _has_lines(matrix: torch.Tensor) -> bool:
    if matrix.is_contiguous() or matrix.mT.is_contiguous():
        return True
    (rows, columns), (down, along) = matrix.shape[-2:], matrix.stride()[-2:]
    return (along == 1 and down >= max(1, columns)) or (down == 1 and along >= max(1, rows))


def _index_put(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Where values that meet are added up: a number for each place, sorted (cuda/Indexing.cu).

    The buffers are those of an embedding's gradient, and the numbers themselves.
    """
    if len(args) < 4 or not args[3]:
        return []
    shapes = [index.shape for index in args[1] if index is not None]
    places = prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # torch's
    return [8 * places] * 5


def _roll(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """It is rolled along one dimension at a time (`roll_common` of TensorTransformations.h)."""
    return [_bytes(args[0])] if len(args[1]) > 1 else []


def _fourier(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """The plan's work area, the least that NVIDIA's manual gives: as much as the complex side.

    What is turned into real numbers is copied first, since cuFFT may overwrite it
    (`_fft_c2r_cufft` of cuda/SpectralOps.cpp).
    """
    if not result.is_complex():
        return [_bytes(args[0])] * 2
    return [_bytes(result)]


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


def _safe_softmax(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Where the argument is minus infinity, and in which rows all of it (attention.cpp)."""
    return [result.numel(), result.numel() // max(result.size(args[1]), 1)]


def _embedding_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Up to 3072 indices one kernel adds in place (Embedding.cu)."""
    indices, rows, by_frequency = args[1], args[2], args[4]
    if indices.numel() <= 3072 and not by_frequency:
        return []
    return _sums_of_rows(indices, rows, prod(args[0].shape[indices.dim() :]))


def _embedding_bag_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """As an embedding's, however few the indices are; not for the maximum (EmbeddingBag.cu)."""
    indices, rows, mode = args[1], args[5], args[7]
    return _sums_of_rows(indices, rows, args[0].size(1)) if mode != 2 else []


def _sums_of_rows(indices: torch.Tensor, rows: int, width: int) -> list[int]:
    """Sorted indices and partial sums by segments of at most 10 (EmbeddingBackwardKernel.cu).

    The radix sort's own buffer is its four arrays of indices.
    """
    count, item = indices.numel(), indices.element_size()
    segments = min(count, rows)
    partial = count // 10 + segments
    sorting = [item * count] * 4
    return [*sorting, item * segments, item * segments, item * partial, 4 * partial * width]


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
    width, weight = prod(args[2]), args[5]
    rows = args[1].numel() // max(width, 1)
    if weight is None or rows <= 64 * 1024 or width // 32 >= gpu.multiprocessors // 2:
        return []
    parts = min(32 * 1024 // -(-width // 32), -(-rows // 32))
    return [parts * width * weight.element_size()] * 2


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("sum", "mean", "linalg_vector_norm", "amax", "amin", "prod", "norm", "nansum"), _reduction
    ),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), _fourier),
    **dict.fromkeys(
        ("mse_loss", "smooth_l1_loss", "huber_loss"),
        _loss,
    ),
    **dict.fromkeys(("binary_cross_entropy", "soft_margin_loss"), _loss_in_place),
    "binary_cross_entropy_with_logits": _loss_of_logits,
    "index_put": _index_put,
    "_index_put_impl_": _index_put,
    "roll": _roll,
    "logsumexp": _logsumexp,
    "_safe_softmax": _safe_softmax,
    "_softmax_backward_data": _softmax_backward,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_dense_backward": _embedding_bag_backward,
    "_scaled_dot_product_cudnn_attention": lambda *_: [256],
    "_scaled_dot_product_cudnn_attention_backward": cudnn_attention_backward,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "_foreach_norm": _foreach_norm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
