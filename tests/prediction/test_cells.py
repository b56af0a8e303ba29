"""Cells of recurrent layers: shapes as on the CPU, and what CUDA's fused kernels keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.prediction.cuda_tracer import CudaTracer
from autofit.prediction.gpus import find_gpu
from autofit.prediction.rehearsal import stage

SAMPLES, WIDTH = 256, 128
STATE = SAMPLES * WIDTH * 4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_results_and_gradients_have_the_shapes_of_the_cpu(
    kind: type[nn.LSTMCell | nn.GRUCell], autocast: bool, bias: bool
) -> None:
    tracer = CudaTracer(find_gpu("A100"))
    with stage(tracer.gpu, tracer):
        cell = kind(6, 8, bias=bias, device="cuda")
        with torch.autocast("cuda", enabled=autocast):
            result: Any = cell(torch.randn(3, 6, device="cuda"))
        hidden = result[0] if kind is nn.LSTMCell else result
        assert hidden.shape == (3, 8)
        assert hidden.dtype == (torch.float16 if autocast else torch.float32)
        hidden.float().sum().backward()
        for parameter in cell.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
        del result, hidden, cell


@pytest.mark.parametrize(
    ("kind", "states"), [(nn.LSTMCell, 4 + 4 + 4 + 2), (nn.GRUCell, 3 + 3 + 5 + 1)]
)
def test_both_products_and_the_gates_are_kept(
    kind: type[nn.LSTMCell | nn.GRUCell], states: int
) -> None:
    """In states: the products, the kernel's workspace and what it returns (RNN.cu)."""
    tracer = CudaTracer(find_gpu("A100"))
    with stage(tracer.gpu, tracer):
        cell = kind(WIDTH, WIDTH, device="cuda")
        data = torch.randn(SAMPLES, WIDTH, device="cuda")
        state: Any = cell(data)  # workspaces of the products, too
        before = tracer.allocator.allocated_bytes
        following = cell(data, state)
        assert tracer.allocator.allocated_bytes - before == states * STATE
        del state, following, cell
