"""Memory that CUDA kernels allocate for themselves while an operator runs.

A trace of tensors shows what operators return. Kernels also take buffers that are gone when they
return. `RULES` holds those that required bytes need: partial results of sums, and the products in
the backward pass of an attention that is computed step by step, which are as large as its scores.
The others that a GPU allocates (`benchmarks/results`) are small beside what is live then, and left
to the margin of a prediction. All sizes are bytes, in the order of allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any, TypeAlias

import torch

from autofit.devices.gpus import Gpu

Sizes: TypeAlias = Callable[[Any, Any, Gpu], list[int]]
"""(positional arguments, result, GPU) -> sizes of the buffers."""


def scratch_bytes(name: str, args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Return the sizes of the buffers of one call of `aten::<name>`; none without a rule."""
    return RULES[name](args, result, gpu) if name in RULES else []


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


RULES: dict[str, Sizes] = {
    "sum": _sum,
    "mean": _sum,  # the same kernel
    "_softmax_backward_data": lambda args, *_: [args[0].nbytes],
}
"""By operator."""
