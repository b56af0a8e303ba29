"""The global memory that CUDA reductions (sum, mean, norms) take while they run.

Follows `setReduceConfig` of aten/src/ATen/native/cuda/Reduce.cuh. A reduction to few outputs is
spread over thread blocks, which pass partial results to each other through a buffer: for the
gradient of a bias it is many times larger than the gradient itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

from autofit.prediction.gpus import Gpu

MOST_THREADS = 512
WARP = 32
FEWEST_VALUES_PER_THREAD = 16
MOST_VALUES_PER_THREAD = 256
VECTOR = 4


@dataclass(frozen=True)
class Reduction:
    """A reduction of a dense tensor.

    Attributes:
        shape: of the input.
        strides: of the input, in elements.
        dims: those that are reduced, not negative.
        accumulator_bytes: size of one partial result.
    """

    shape: Sequence[int]
    strides: Sequence[int]
    dims: frozenset[int]
    accumulator_bytes: int = 4

    @property
    def outputs(self) -> int:
        return prod(size for at, size in enumerate(self.shape) if at not in self.dims)

    @property
    def inputs_per_output(self) -> int:
        return prod(size for at, size in enumerate(self.shape) if at in self.dims)

    @property
    def fastest(self) -> int:
        """The dimension whose elements lie closest together."""
        order = [at for at, size in enumerate(self.shape) if size > 1]
        return min(order, key=lambda at: self.strides[at], default=0)

    @property
    def along_fastest(self) -> bool:
        """Whether the reduced elements lie closer together; of an expanded number, none do."""
        kept = self._least_stride(reduced=False)
        return kept == inf or self._least_stride(reduced=True) < kept

    def _least_stride(self, *, reduced: bool) -> float:
        """Of the dimensions that are reduced, or of those kept; infinite where there is none."""
        return min(
            (
                stride
                for at, (stride, size) in enumerate(zip(self.strides, self.shape, strict=True))
                if size > 1 and (at in self.dims) is reduced
            ),
            default=inf,
        )

    @property
    def is_one_run(self) -> bool:
        """Whether all of a gapless input becomes one number."""
        last = max((s * (n - 1) for s, n in zip(self.strides, self.shape, strict=True)), default=0)
        return self.outputs == 1 and last < prod(self.shape)


def scratch_of_reduction(reduction: Reduction, gpu: Gpu) -> list[int]:
    """Sizes of the buffers that the reduction allocates: partial results and semaphores."""
    outputs, inputs = reduction.outputs, reduction.inputs_per_output
    if not outputs or not inputs:
        return []
    along = reduction.along_fastest
    width_work, height_work = (inputs, outputs) if along else (outputs, inputs)
    output_vector = 1
    if along and width_work > 128 and reduction.is_one_run:
        width_work //= VECTOR
    elif not along and reduction.strides[reduction.fastest] == 1:
        output_vector = _output_vector(reduction)
        width_work //= output_vector
    width, height = _block(width_work, height_work, MOST_THREADS // output_vector)
    input_step, output_step = (width, 1) if along else (1, width)
    values = -(-inputs // input_step)
    across_warps = values >= min(height * FEWEST_VALUES_PER_THREAD, MOST_VALUES_PER_THREAD)
    if not across_warps:
        return []
    values = -(-inputs // (input_step * height))
    grid = -(-(outputs // output_vector) // output_step)
    target = gpu.multiprocessors * (gpu.threads_per_multiprocessor // (width * height))
    if values < MOST_VALUES_PER_THREAD or grid > target:
        return []
    blocks = max(
        min(-(-target // grid), -(-values // FEWEST_VALUES_PER_THREAD)),
        -(-values // MOST_VALUES_PER_THREAD),
    )
    if blocks <= 1:
        return []
    partial = reduction.accumulator_bytes * outputs * blocks
    if not along:
        partial *= width * output_vector
    return [partial, 4 * grid]


def _block(width_work: int, height_work: int, most_threads: int) -> tuple[int, int]:
    width_most = _power_of_two_below(width_work, most_threads)
    height = min(
        _power_of_two_below(height_work, most_threads), most_threads // min(width_most, WARP)
    )
    return min(width_most, most_threads // height), height


def _power_of_two_below(work: int, most: int) -> int:
    return most if work >= most else 1 << max(work, 1).bit_length() - 1


def _output_vector(reduction: Reduction) -> int:
    """How many neighbouring outputs a thread loads at once."""
    vector = VECTOR
    kept = [at for at in range(len(reduction.shape)) if at not in reduction.dims]
    run = 1
    for at in sorted(kept, key=lambda at: reduction.strides[at]):
        if reduction.strides[at] != run:
            break
        run *= reduction.shape[at]
    others = [s for at, s in enumerate(reduction.strides) if at in reduction.dims]
    while vector > 1 and any(n % vector for n in (run, *others)):
        vector //= 2
    return vector
