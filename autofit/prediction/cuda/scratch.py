"""Memory that CUDA kernels allocate for themselves while an operator runs.

A trace of tensors shows what operators return. Kernels also take buffers that are gone when they
return: partial sums, sorted indices, copies of arguments that are not contiguous. `RULES` holds
the buffers that recordings of a GPU show; everything else is left to the margin of a prediction.
All sizes are bytes, in the order of allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf, prod
from typing import Any, TypeAlias

import torch

from autofit.prediction.gpus import Gpu

Sizes: TypeAlias = Callable[[Any, Any, Gpu], list[int]]
"""(positional arguments, result, GPU) -> sizes of the buffers."""


class Evidence(Enum):
    """Why a rule is kept; `benchmarks/prediction_ablation.py` measures what each one buys."""

    TRAINING = "required bytes of recorded trainings need it"
    OPERATOR = "operators in recorded trainings allocate exactly this"


@dataclass(frozen=True)
class Rule:
    """The buffers of one operator's kernels, and why the rule is kept."""

    sizes: Sizes
    evidence: Evidence


def scratch_bytes(name: str, args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Return the sizes of the buffers of one call of `aten::<name>`; none without a rule."""
    rule = RULES.get(name)
    return rule.sizes(args, result, gpu) if rule is not None else []


def reduction_bytes(tensor: torch.Tensor, dims: frozenset[int], gpu: Gpu) -> list[int]:
    """Return the buffers of a sum or mean over some dimensions: partial results and semaphores.

    A reduction to few outputs is spread over thread blocks, which pass partial results to each
    other through global memory: for the gradient of a bias this is many times larger than the
    gradient itself. Follows `setReduceConfig` of aten/src/ATen/native/cuda/Reduce.cuh.

    Args:
        tensor: the input.
        dims: the dimensions that are reduced, not negative.
        gpu: where it runs.
    """
    if not tensor.numel():
        return []
    shape, strides = tensor.shape, tensor.stride()
    outputs = prod(size for at, size in enumerate(shape) if at not in dims)
    inputs = tensor.numel() // outputs
    kept_stride, reduced_stride = (_least_stride(tensor, dims, of=of) for of in (False, True))
    along = kept_stride == inf or reduced_stride < kept_stride
    width_work, height_work = (inputs, outputs) if along else (outputs, inputs)
    output_vector = 1
    if along and width_work > 128 and outputs == 1 and _is_gapless(tensor):
        width_work //= _VECTOR
    elif not along and kept_stride == 1:
        output_vector = _output_vector(shape, strides, dims)
        width_work //= output_vector
    width, height = _block(width_work, height_work, _MOST_THREADS // output_vector)
    input_step, output_step = (width, 1) if along else (1, width)
    if -(-inputs // input_step) < min(height * _FEWEST_VALUES, _MOST_VALUES):
        return []
    values = -(-inputs // (input_step * height))
    grid = -(-(outputs // output_vector) // output_step)
    target = gpu.multiprocessors * (gpu.threads_per_multiprocessor // (width * height))
    if values < _MOST_VALUES or grid > target:
        return []
    blocks = max(
        min(-(-target // grid), -(-values // _FEWEST_VALUES)),
        -(-values // _MOST_VALUES),
    )
    if blocks <= 1:
        return []
    accumulator_bytes = 8 if tensor.dtype in (torch.float64, torch.int64) else 4
    partial = accumulator_bytes * outputs * blocks
    return [partial if along else partial * width * output_vector, 4 * grid]


_MOST_THREADS = 512
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread reduces."""
_VECTOR = 4


def _least_stride(tensor: torch.Tensor, dims: frozenset[int], *, of: bool) -> float:
    """Return the least stride of the reduced (or kept) dimensions; infinite without one."""
    sizes = enumerate(zip(tensor.stride(), tensor.shape, strict=True))
    return min((step for at, (step, size) in sizes if size > 1 and (at in dims) is of), default=inf)


def _is_gapless(tensor: torch.Tensor) -> bool:
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return max((step * (size - 1) for step, size in pairs), default=0) < tensor.numel()


def _block(width_work: int, height_work: int, most_threads: int) -> tuple[int, int]:
    """Return the threads of a block, along the fastest dimension and across it."""
    widest = _power_of_two_below(width_work, most_threads)
    height = min(_power_of_two_below(height_work, most_threads), most_threads // min(widest, _WARP))
    return min(widest, most_threads // height), height


def _power_of_two_below(work: int, most: int) -> int:
    return most if work >= most else 1 << max(work, 1).bit_length() - 1


def _output_vector(shape: torch.Size, strides: tuple[int, ...], dims: frozenset[int]) -> int:
    """Return how many neighbouring outputs a thread loads at once."""
    vector, run = _VECTOR, 1
    kept = [at for at in range(len(shape)) if at not in dims]
    for at in sorted(kept, key=lambda at: strides[at]):
        if strides[at] != run:
            break
        run *= shape[at]
    while vector > 1 and any(n % vector for n in (run, *(strides[at] for at in dims))):
        vector //= 2
    return vector


def _sum(args: Any, result: Any, gpu: Gpu) -> list[int]:
    tensor, *others = args
    named = others[0] if others and isinstance(others[0], (list, tuple)) else ()
    dims = frozenset(dim % tensor.dim() for dim in named) or frozenset(range(tensor.dim()))
    return reduction_bytes(tensor, dims, gpu)


def _mse_loss(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Return the loss of each element, and a reduction of them (BinaryOps.cpp)."""
    if result.dim():
        return []
    losses = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
    return [losses.nbytes, *reduction_bytes(losses, frozenset(range(losses.dim())), gpu)]


def _embedding_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Return sorted indices and partial sums by segments of 10 (EmbeddingBackwardKernel.cu).

    Up to 3072 indices a single kernel adds in place (Embedding.cu).
    """
    gradient, indices, rows, _, by_frequency = args
    count, item = indices.numel(), indices.element_size()
    if count <= 3072 and not by_frequency:
        return []
    segments = min(count, rows)
    partial = count // 10 + segments
    width = prod(gradient.shape[indices.dim() :])
    return [item * count] * 4 + [item * segments] * 2 + [item * partial, 4 * partial * width]


def _foreach_norm(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Return a partial sum for each chunk of 65536 elements (ForeachReduceOp.cu)."""
    chunks = max((-(-tensor.numel() // 65536) for tensor in args[0]), default=0)
    return [4 * chunks * len(args[0])]


def _cudnn_attention_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Return float32 gradients of the queries, and a row of sums, in one buffer."""
    batch, heads, length, width = args[1].shape
    return [4 * batch * heads * length * (width + 1) + 256]


def _efficient_attention_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Return row sums of `grad * out`, and float32 gradients of the queries in blocks of 64.

    For float32 the row sums are computed before the kernel (attention_backward.cu).
    """
    query = args[1]
    batch, heads, length, width = query.shape
    rows = 4 * batch * heads * length
    blocks = -(-length // 64)
    accumulators = 4 * batch * heads * (blocks * 64 * (-(-width // 64) * 64) + 4 * blocks)
    before = [rows * width, rows] if query.dtype == torch.float32 else []
    return [*before, rows, accumulators]


def _group_norm(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Return a scale and a shift for each sample and channel (group_norm_kernel.cu)."""
    return [4 * args[3] * args[4]] * 2


def _group_norm_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    by_channel, by_group = 4 * args[5] * args[6], 4 * args[5] * args[8]
    return [by_channel, by_channel, by_group, by_group, by_channel]


def _copies(*positions: int) -> Sizes:
    """Return a rule for kernels that call `contiguous()` on the arguments at those positions."""

    def sizes(args: Any, result: Any, gpu: Gpu) -> list[int]:
        return [args[at].nbytes for at in positions if not args[at].is_contiguous()]

    return sizes


def _image_copy(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Return a copy of an image that is contiguous neither plainly nor with channels last."""
    image = args[0]
    dense = image.is_contiguous() or image.is_contiguous(memory_format=torch.channels_last)
    return [] if dense else [image.nbytes]


RULES = {
    "sum": Rule(_sum, Evidence.TRAINING),
    "mean": Rule(_sum, Evidence.TRAINING),  # the same kernel
    "embedding_dense_backward": Rule(_embedding_backward, Evidence.OPERATOR),
    "mse_loss": Rule(_mse_loss, Evidence.OPERATOR),
    "_softmax_backward_data": Rule(lambda args, *_: [args[0].nbytes], Evidence.OPERATOR),
    "_scaled_dot_product_cudnn_attention_backward": Rule(
        _cudnn_attention_backward, Evidence.OPERATOR
    ),
    "_scaled_dot_product_efficient_attention_backward": Rule(
        _efficient_attention_backward, Evidence.OPERATOR
    ),
    "_foreach_norm": Rule(_foreach_norm, Evidence.OPERATOR),
    "native_layer_norm": Rule(_copies(0), Evidence.OPERATOR),
    "native_layer_norm_backward": Rule(_copies(0, 1), Evidence.OPERATOR),
    "native_group_norm": Rule(_group_norm, Evidence.OPERATOR),
    "native_group_norm_backward": Rule(_group_norm_backward, Evidence.OPERATOR),
    "upsample_nearest2d_backward": Rule(_image_copy, Evidence.OPERATOR),
}
"""By operator. A kernel that only PyTorch's sources vouch for has no rule: the margin covers it."""
