"""Seconds of an optimizer step by a roofline over the operations of a dry run.

An operation takes as long as its floating-point operations at the GPU's rate for their type, or as
its memory traffic at the GPU's bandwidth, whichever is longer. Caches, the choice of kernels and
how well they fill the GPU are not seen, so the seconds are good for ratios between the plans of one
training, and for nothing else.

Traffic is what an operator reads and writes, and its scratch memory written and read once (so the
copies between layouts that cuDNN makes count). Batch normalization reads its data once more for
the statistics, unless cuDNN keeps it on the chip. Memory that is made empty counts as written: some
kernels that the dry run stands in for are seen as no more than that. Causal attention counts whole,
as `torch.utils.flop_counter` has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from autofit.devices.gpu_catalogue import Gpu, Rates
from autofit.memory.tracer import storages_of, tensors_in
from autofit.prediction.cuda.scratch import GpuSized, Size
from autofit.training.flops import formula_of

# Least seconds between two operations of eager PyTorch.
LAUNCH_S = 5e-6
_WRITE_ONLY = frozenset({"copy_", "fill_", "zero_"})
# Operators that touch no data, besides those that PyTorch's schemas mark as views.
_NO_KERNEL = frozenset({"_unsafe_view", "resize_", "set_"})


@dataclass(frozen=True)
class Cost:
    """The estimated cost of a part of a training; see the module.

    Attributes:
        kernel_seconds: the sum over its operations.
        launch_seconds: the least time in which the host launches them.
    """

    kernel_seconds: float
    launch_seconds: float

    @property
    def seconds(self) -> float:
        """The longer of the two, since kernels run while the next ones are launched."""
        return max(self.kernel_seconds, self.launch_seconds)


@dataclass(frozen=True)
class Operation:
    """The work of an operator's kernels.

    Attributes:
        flops: floating-point operations.
        traffic_bytes: what it reads and writes, without what follows.
        scratch: memory whose size the GPU decides, written and read once.
        dtype: of its operands.
        tf32: whether they may be multiplied in TF32.
    """

    flops: int
    traffic_bytes: int
    scratch: tuple[GpuSized, ...] = ()
    dtype: torch.dtype = torch.float32
    tf32: bool = False

    def seconds_on(self, gpu: Gpu, rates: Rates) -> float:
        """Return its time on a GPU with these rates."""
        traffic = self.traffic_bytes + sum(2 * size.bytes_on(gpu) for size in self.scratch)
        rate = rates.float32_flops_per_s
        half = (torch.float16, torch.bfloat16) if gpu.native_bfloat16 else (torch.float16,)
        if self.tf32 and gpu.tf32:
            rate = rates.tf32_flops_per_s
        elif self.dtype.itemsize == 1 or self.dtype in half:
            rate = rates.half_flops_per_s
        return max(traffic / rates.bytes_per_s, self.flops / rate)


def cost_on(gpu: Gpu, operations: Iterable[Operation], parts: int = 1) -> Cost | None:
    """Return the cost of operations on a GPU, divided by a number of equal parts.

    None where the rates of the GPU are unknown.
    """
    rates = gpu.rates
    if rates is None:
        return None
    seconds = [operation.seconds_on(gpu, rates) for operation in operations]
    return Cost(sum(seconds) / parts, len(seconds) * LAUNCH_S / parts)


def operation_of(
    func: Any, args: Any, kwargs: Any, result: Any, sizes: Iterable[Size]
) -> Operation | None:
    """Return the work of an operator on meta tensors; None: it runs no kernel on the GPU.

    Args:
        func: the operator's overload.
        args: of the call.
        kwargs: of the call.
        result: of the call.
        sizes: memory that its kernels take for themselves.
    """
    name = func._schema.name.removeprefix("aten::")
    if func.is_view or name in _NO_KERNEL:
        return None
    read = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_meta]
    changed = result if result is not None else _changed(func, args)
    written = [tensor for tensor in tensors_in(changed) if tensor.is_meta]
    if not read and not written:
        return None
    if name in _WRITE_ONLY:
        read = read[1:]
    scratch_bytes = [size for size in sizes if isinstance(size, int)]
    traffic = sum(map(_nbytes, read)) + sum(map(_nbytes, written)) + 2 * sum(scratch_bytes)
    if name in _BATCH_NORMS:
        traffic += _read_again(name, args)
    gpu_sized = tuple(size for size in sizes if not isinstance(size, int))
    count = formula_of(func)
    if count is None:
        return Operation(0, traffic, gpu_sized)
    flops, dtype = 0, read[0].dtype
    with suppress(Exception):  # an estimate of time must not cost a prediction of memory
        flops = count(*args, **kwargs, out_val=result)
    tf32 = dtype == torch.float32 and tf32_allowed(cudnn=name in _CUDNN)
    return Operation(flops, traffic, gpu_sized, dtype, tf32)


def _changed(func: Any, args: Any) -> list[Any]:
    """Return the arguments that an operator on lists changes."""
    pairs = zip(args, func._schema.arguments, strict=False)
    return [arg for arg, schema in pairs if schema.alias_info and schema.alias_info.is_write]


def tf32_allowed(*, cudnn: bool) -> bool:
    """Return whether PyTorch may run float32 products in TF32: of cuDNN (convolutions), or others.

    It refuses to tell by its older switch where only the newer one was set.
    """
    backends: Any = torch.backends  # torch does not annotate its parts
    try:
        return bool((backends.cudnn if cudnn else backends.cuda.matmul).allow_tf32)
    except RuntimeError:  # from torch 2.9 on, which has the newer one
        new = backends.cudnn.conv if cudnn else backends.cuda.matmul
        return bool(new.fp32_precision == "tf32")


# By the number of dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CUDNN = frozenset({"convolution", "convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward"})


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a kernel touches: those of an expanded tensor once."""
    if tensor.layout is not torch.strided:
        return sum(storage.nbytes() for storage in storages_of(tensor))
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel() * tensor.element_size()
    sizes = (size for size, stride in zip(tensor.shape, strides, strict=True) if stride)
    return prod(sizes) * tensor.element_size()


# Operator -> how many of its arguments are as large as the data; the place of `training`.
_BATCH_NORMS = {"native_batch_norm": (1, 5), "native_batch_norm_backward": (2, 7)}


def _read_again(name: str, args: Any) -> int:
    """Return the bytes that batch normalization in training reads twice; none in persistent mode.

    PyTorch asks cuDNN for that mode with channels last (`getCudnnBatchNormMode` of
    cudnn/BatchNorm.cpp), and runs its own kernels for bfloat16 (`_select_batch_norm_backend` of
    Normalization.cpp).
    """
    large, training = _BATCH_NORMS[name]
    if len(args) <= training:  # called by name, which autograd does not
        return 0
    data = args[0]
    layout = CHANNELS_LAST.get(data.dim())
    channels_last = layout is not None and data.is_contiguous(memory_format=layout)
    if not args[training] or (channels_last and data.dtype != torch.bfloat16):
        return 0
    return sum(map(_nbytes, args[:large]))
