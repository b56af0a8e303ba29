"""The workspaces that cuDNN takes for convolutions.

cuDNN documents neither which algorithm its heuristics choose nor how much memory one needs. The
following mechanism explains what recorded trainings show to the byte:

- Tensor cores (16-bit types, and float32 where TF32 is allowed) want channels last, with a
  multiple of 8 channels for 16-bit types; other layouts are copied over, results copied back.
- Without TF32, float32 runs in the contiguous layout, and it is channels last that is copied.
  Convolutions of 3x3 with stride 1 multiply transformed tiles (Winograd), which are stored.
- A pointwise convolution is a plain matrix product where its rows are aligned; its weight gradient
  is then summed over the samples' products, each stored in float32.

A workspace is dispensable: without memory for it PyTorch runs the next algorithm, and stays with
that one, as `autofit.memory.replay` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch

from autofit.devices.gpu_catalogue import Gpu
from autofit.prediction.cuda.roofline import CHANNELS_LAST, tf32_allowed
from autofit.torch_private import suggest_memory_format

_ALIGNMENT_BYTES = 16
_TILE = 128


class Direction(Enum):
    """The result that is computed: the output, or a gradient."""

    FORWARD = "forward"
    DATA = "data gradient"
    WEIGHT = "weight gradient"


@dataclass(frozen=True)
class Convolution:
    """A convolution's shapes: data (samples, channels, ...), weight, result, as for `conv2d`."""

    data: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def pointwise(self) -> bool:
        return prod(self.weight[2:]) == 1 and set(self.stride) == {1}

    @property
    def patches(self) -> bool:
        """Whether the windows lie side by side, as a vision transformer's."""
        return self.weight[2:] == self.stride and not self.pointwise

    @property
    def depthwise(self) -> bool:
        """Whether PyTorch's own kernels run it."""
        return self.groups > 1 and self.groups == self.data[1]

    def copies(self, multiple: int) -> tuple[int, int, int]:
        """Return bytes of data, weight and result with their channels padded to a multiple."""
        data = _padded(self.data, {1}, multiple)
        weight = _padded(self.weight, {0, 1}, multiple) if prod(self.weight[2:]) > 1 else 0
        result = _padded(self.result, {1}, multiple)
        return (
            data * self.dtype.itemsize,
            weight * self.dtype.itemsize,
            result * self.dtype.itemsize,
        )


def workspace_bytes(convolution: Convolution, direction: Direction, gpu: Gpu) -> int:
    """Return the bytes that cuDNN takes for a convolution where memory is free."""
    if convolution.depthwise:
        return 0
    if _on_tensor_cores(convolution.dtype, gpu):
        taken = _tensor_cores(convolution, direction, gpu)
    else:
        copied = sum(convolution.copies(1)) if convolution.channels_last else 0
        taken = copied + _winograd(convolution, direction)
    return taken + _ALIGNMENT_BYTES if taken else 0


def _on_tensor_cores(dtype: torch.dtype, gpu: Gpu) -> bool:
    if dtype == torch.float32:
        return tf32_allowed(cudnn=True) and gpu.tf32
    return gpu.tensor_cores


def _tensor_cores(convolution: Convolution, direction: Direction, gpu: Gpu) -> int:
    multiple = 8 if convolution.dtype.itemsize == 2 else 1
    data, weight, result = convolution.copies(multiple)
    summed = _partial_sums(convolution, gpu) if direction is Direction.WEIGHT else 0
    if convolution.patches and (direction is Direction.FORWARD or multiple == 1):
        return 0
    if convolution.channels_last:
        return (data + weight if convolution.data[1] % multiple else 0) + summed
    if not convolution.pointwise:
        return data + weight + result + summed
    sums = 4 * convolution.data[0] * prod(convolution.weight)
    row_bytes = prod(convolution.data[2:]) * convolution.dtype.itemsize
    if row_bytes % _ALIGNMENT_BYTES:
        return data + result + summed
    return min(sums, data + result) if direction is Direction.WEIGHT else 0


def _partial_sums(convolution: Convolution, gpu: Gpu) -> int:
    """Return float32 sums of a weight gradient, which parts of the samples add up apart.

    The recorded ones are as many as let tiles of 128 x 128 keep half of the multiprocessors busy.
    """
    out, elements = convolution.weight[0], prod(convolution.weight)
    tiles = -(-out // _TILE) * -(-elements // out // _TILE)
    parts = round(gpu.multiprocessors / 2 / tiles)
    return 4 * parts * elements if parts > 1 else 0


def _winograd(convolution: Convolution, direction: Direction) -> int:
    """Return float32 tiles of 4x4 results for weight gradients, else 6x6, with a border of 2.

    Gradients of data multiply none: without theirs, recorded peaks of a ResNet are met to 0.1%.
    """
    plain = set(convolution.stride) == {1} == set(convolution.dilation)
    if direction is Direction.DATA or convolution.weight[2:] != (3, 3):
        return 0
    if not plain or convolution.groups != 1:
        return 0
    tile = 4 if direction is Direction.WEIGHT else 6
    height, width = convolution.result[2:]
    tiles = convolution.data[0] * -(-height // tile) * -(-width // tile)
    points = (tile + 2) ** 2
    channels, out = convolution.data[1], convolution.result[1]
    return 4 * points * (tiles * (channels + out) + channels * out)


def _padded(shape: tuple[int, ...], dims: set[int], multiple: int) -> int:
    return prod(
        -(-size // multiple) * multiple if at in dims else size for at, size in enumerate(shape)
    )


def in_layout_of_cudnn(
    data: torch.Tensor, weight: torch.Tensor, results: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Return results of `aten::convolution` and its backward in cuDNN's memory format."""
    layout = _layout(data, weight)
    return tuple(
        torch.empty_like(result, memory_format=layout)
        if result is not None
        and result.dim() == data.dim()
        and not result.is_contiguous(memory_format=layout)
        else result
        for result in results
    )


def copied_operands(convolution: Convolution, operands: Any) -> list[int]:
    """Return sizes of the operands that PyTorch copies to the layout of the convolution."""
    layout = torch.contiguous_format
    if convolution.channels_last:
        layout = CHANNELS_LAST[len(convolution.data)]
    return [each.nbytes for each in operands if not each.is_contiguous(memory_format=layout)]


def convolution_of(
    name: str, args: Any, result: Any
) -> tuple[Convolution, list[Direction], Sequence[torch.Tensor]]:
    """Return what `aten::convolution` or its backward was called for, and its operands.

    A transposed convolution is the gradient of another's data: data and result change places.
    """
    if name == "convolution":
        data, weight, _, stride, _, dilation, transposed, _, groups = args
        operands, directions = args[:2], [Direction.FORWARD]
    else:
        result, data, weight, _, stride, _, dilation, transposed, _, groups, wanted = args
        pairs = zip((Direction.DATA, Direction.WEIGHT), wanted, strict=False)
        operands, directions = args[:3], [direction for direction, wants in pairs if wants]
    if transposed:
        data, result = result, data
        swapped = {Direction.FORWARD: Direction.DATA, Direction.DATA: Direction.FORWARD}
        directions = [swapped.get(direction, direction) for direction in directions]
    convolution = Convolution(
        tuple(data.shape),
        tuple(weight.shape),
        tuple(result.shape),
        data.dtype,
        _layout(data, weight) is not torch.contiguous_format,
        tuple(stride),
        tuple(dilation),
        groups,
    )
    return convolution, directions, operands


def _layout(data: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return channels last if data or weight are so (`cudnn_conv_suggest_memory_format`)."""
    last = CHANNELS_LAST.get(data.dim(), torch.contiguous_format)
    suggested = suggest_memory_format(data), suggest_memory_format(weight)
    return last if last in suggested else torch.contiguous_format
