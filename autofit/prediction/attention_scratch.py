"""What the backward kernels of attention allocate for themselves, in bytes."""

from __future__ import annotations

from typing import Any

import torch

from autofit.prediction.gpus import Gpu


def cudnn_attention_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """cuDNN: float32 gradients of the queries, and a row of sums."""
    query = args[1]
    batch, heads, length, width = query.shape
    return [4 * batch * heads * length * (width + 1) + 256]


def flash_attention_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
    """Row sums, and float32 gradients of the queries, both padded (flash_api.cpp)."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rounded = -(-length // 128) * 128
    wide = -(-width // 32) * 32
    sizes = [4 * batch * heads * rounded, 4 * batch * heads * rounded * wide]
    if key.size(1) != heads:
        sizes += [2 * batch * heads * key.size(2) * width] * 2
    return sizes


def efficient_attention_backward(args: Any, result: Any, gpu: Gpu) -> list[int]:
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
