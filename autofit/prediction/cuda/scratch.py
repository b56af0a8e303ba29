"""Memory that CUDA kernels allocate for themselves while an operator runs.

A trace of tensors shows what operators return. Kernels also take buffers that are gone when they
return. `RULES` holds those that required bytes need: partial results of sums, and what the backward
passes of attention take: as much as its scores where it is computed step by step, else its queries.
The others that a GPU allocates (`benchmarks/results`) are small beside what is live then, and left
to the margin of a prediction. All sizes are bytes, in the order of allocation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, prod
from typing import Any, TypeAlias

import torch

from autofit.devices.gpu_catalogue import Gpu
from autofit.memory.replay import Recording
from autofit.units import KIB


@dataclass(frozen=True)
class Workspace:
    """What cuBLAS takes for each thread that multiplies matrices."""

    def bytes_on(self, gpu: Gpu) -> int:
        """Return its size on a GPU, or what CUBLAS_WORKSPACE_CONFIG says."""
        return configured_workspace_bytes() or gpu.cublas_workspace_bytes


def configured_workspace_bytes() -> int | None:
    """Return the bytes of CUBLAS_WORKSPACE_CONFIG, such as ":4096:2:16:8" (KiB).

    None if not set.
    """
    numbers = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(count) for size, count in numbers) * KIB or None


@dataclass(frozen=True)
class Reduction:
    """A sum, mean or norm over some dimensions, and the buffers that it takes.

    A reduction to few outputs is spread over thread blocks, which pass partial results to each
    other through global memory: for the gradient of a bias this is many times larger than the
    gradient itself. Follows `setReduceConfig` of aten/src/ATen/native/cuda/Reduce.cuh.

    Attributes:
        shape, strides: of the input.
        dims: the dimensions that are reduced, not negative.
        accumulator_bytes: of a partial result.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dims: frozenset[int]
    accumulator_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor, dims: frozenset[int]) -> Reduction:
        """Return the reduction of a tensor."""
        accumulator_bytes = 8 if tensor.dtype in (torch.float64, torch.int64) else 4
        return cls(tuple(tensor.shape), tensor.stride(), dims, accumulator_bytes)

    @lru_cache(maxsize=4096)  # noqa: B019  # equal ones share entries, and they hold no tensor
    def bytes_on(self, gpu: Gpu) -> int:
        """Return the bytes of partial results on a GPU; 0 without any.

        The semaphores beside them take a few bytes a block, which are left out.
        """
        numel = prod(self.shape)
        if not numel:
            return 0
        outputs = prod(size for at, size in enumerate(self.shape) if at not in self.dims)
        inputs = numel // outputs
        kept_stride, reduced_stride = (self._min_stride(of=of) for of in (False, True))
        along = kept_stride == inf or reduced_stride < kept_stride
        width_work, height_work = (inputs, outputs) if along else (outputs, inputs)
        output_vector = 1
        if along and width_work > 128 and outputs == 1 and self._is_gapless:
            width_work //= _VECTOR
        elif not along and kept_stride == 1:
            output_vector = _output_vector(self.shape, self.strides, self.dims)
            width_work //= output_vector
        width, height = _block(width_work, height_work, _MAX_THREADS // output_vector)
        input_step, output_step = (width, 1) if along else (1, width)
        if -(-inputs // input_step) < min(height * _MIN_VALUES, _MAX_VALUES):
            return 0
        values = -(-inputs // (input_step * height))
        grid = -(-(outputs // output_vector) // output_step)
        target = gpu.multiprocessors * (gpu.threads_per_multiprocessor // (width * height))
        if values < _MAX_VALUES or grid > target:
            return 0
        blocks = max(
            min(-(-target // grid), -(-values // _MIN_VALUES)),
            -(-values // _MAX_VALUES),
        )
        if blocks <= 1:
            return 0
        partial = self.accumulator_bytes * outputs * blocks
        return partial if along else partial * width * output_vector

    def _min_stride(self, *, of: bool) -> float:
        """Return the least stride of the reduced (or kept) dimensions; infinite without one."""
        sizes = enumerate(zip(self.strides, self.shape, strict=True))
        return min(
            (step for at, (step, size) in sizes if size > 1 and (at in self.dims) is of),
            default=inf,
        )

    @property
    def _is_gapless(self) -> bool:
        pairs = zip(self.strides, self.shape, strict=True)
        return max((step * (size - 1) for step, size in pairs), default=0) < prod(self.shape)


# Memory whose size the GPU decides: where only such sizes differ, a dry run serves both GPUs.
GpuSized: TypeAlias = Workspace | Reduction
# Bytes.
Size: TypeAlias = int | GpuSized
# Positional arguments -> sizes of the buffers.
Sizes: TypeAlias = Callable[[Any], list[Size]]


def scratch(name: str, args: Any) -> list[Size]:
    """Return the sizes of the buffers of one call of `aten::<name>`; none without a rule."""
    return RULES[name](args) if name in RULES else []


def bytes_on(gpu: Gpu, size: Size) -> int:
    """Return a size on a GPU."""
    return size if isinstance(size, int) else size.bytes_on(gpu)


def recording_on(gpu: Gpu, recording: Recording, gpu_sized: Mapping[int, GpuSized]) -> Recording:
    """Return a recording with the sizes that the GPU decides as they are on this one."""
    sizes = {number: size.bytes_on(gpu) for number, size in gpu_sized.items()}
    events = tuple((number, sizes.get(number, nbytes)) for number, nbytes in recording.events)
    return replace(recording, events=events)


_MAX_THREADS = 512
_WARP = 32
# Values that a thread reduces.
_MIN_VALUES, _MAX_VALUES = 16, 256
_VECTOR = 4


def _block(width_work: int, height_work: int, max_threads: int) -> tuple[int, int]:
    """Return the threads of a block, along the fastest dimension and across it."""
    widest = _power_of_two_below(width_work, max_threads)
    height = min(_power_of_two_below(height_work, max_threads), max_threads // min(widest, _WARP))
    return min(widest, max_threads // height), height


def _power_of_two_below(work: int, most: int) -> int:
    return most if work >= most else 1 << max(work, 1).bit_length() - 1


def _output_vector(shape: tuple[int, ...], strides: tuple[int, ...], dims: frozenset[int]) -> int:
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


def _reduction(tensor: torch.Tensor, others: Sequence[Any]) -> list[Size]:
    """Return the buffers of a reduction whose dimensions come first among the other arguments."""
    if not tensor.dim():
        return []
    named = others[0] if others and isinstance(others[0], (list, tuple)) else ()
    dims = frozenset(dim % tensor.dim() for dim in named) or frozenset(range(tensor.dim()))
    return [Reduction.of(tensor, dims)]


def _efficient_attention_backward(args: Any) -> list[Size]:
    """Return row sums of `grad * out`, and float32 gradients of the queries in blocks of 64.

    For float32 the row sums are computed before the kernel (attention_backward.cu).
    """
    query = args[1]
    batch, heads, length, width = query.shape
    rows, blocks = 4 * batch * heads * length, -(-length // 64)
    accumulators = 4 * batch * heads * blocks * (64 * (-(-width // 64) * 64) + 4)
    before = [rows * width, rows] if query.dtype == torch.float32 else []
    return [*before, rows, accumulators]


# By operator.
RULES: dict[str, Sizes] = {
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    "sum": lambda args: _reduction(args[0], args[1:]),
    "mean": lambda args: _reduction(args[0], args[1:]),  # the same kernel
    "linalg_vector_norm": lambda args: _reduction(args[0], args[2:]),  # the second is the order
    "_softmax_backward_data": lambda args: [args[0].nbytes],
}
