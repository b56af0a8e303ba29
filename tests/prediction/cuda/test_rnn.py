"""Recurrent layers as one call: the same layouts as on the CPU, and gradients for all weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.gpu_catalogue import find_gpu
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import stage

KINDS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 5}),
    (nn.LSTM, {"bias": False}),
    (nn.GRU, {"num_layers": 2, "batch_first": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.RNN, {}),
]


def layouts(value: Any) -> list[tuple[int, ...]]:
    if isinstance(value, torch.Tensor):
        return [(*value.shape, *value.stride())]
    return [layout for part in value for layout in layouts(part)]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_lie_as_on_the_cpu(
    kind: type[nn.RNNBase], options: dict[str, Any], autocast: bool
) -> None:
    layer, x = kind(6, 8, **options), torch.randn(3, 4, 6)  # type: ignore[arg-type]  # torch's own signature
    expected = layouts(layer(x))
    tracer = CudaTracer(find_gpu("A100"))
    with stage(tracer):
        on_device = layer.cuda()
        with torch.autocast("cuda", enabled=autocast):
            results = on_device(torch.randn(3, 4, 6, device="cuda"))
        assert layouts(results) == expected
        results[0].float().sum().backward()
        for parameter in on_device.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.dtype == parameter.dtype
        del results, on_device


def test_packed_sequences() -> None:
    tracer = CudaTracer(find_gpu("A100"))
    with stage(tracer):
        layer = nn.LSTM(6, 8, device="cuda")
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.randn(5, 3, 6, device="cuda"), torch.tensor([5, 3, 2])
        )
        output, (hidden, _) = layer(packed)
        assert tuple(output.data.shape) == (10, 8)
        assert tuple(hidden.shape) == (1, 3, 8)
        output.data.sum().backward()
        del layer, packed, output, hidden


SAMPLES, WIDTH = 256, 128
STATE = SAMPLES * WIDTH * 4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cell_results_and_gradients_have_the_shapes_of_the_cpu(
    kind: type[nn.LSTMCell | nn.GRUCell], autocast: bool, bias: bool
) -> None:
    tracer = CudaTracer(find_gpu("A100"))
    with stage(tracer):
        cell: Any = kind(6, 8, bias=bias, device="cuda")
        with torch.autocast("cuda", enabled=autocast):
            result: Any = cell(torch.randn(3, 6, device="cuda"))
        hidden = result[0] if kind is nn.LSTMCell else result
        assert hidden.shape == (3, 8)
        assert hidden.dtype == (torch.float16 if autocast else torch.float32)
        hidden.float().sum().backward()
        for parameter in cell.parameters():
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
    with stage(tracer):
        cell = kind(WIDTH, WIDTH, device="cuda")
        data = torch.randn(SAMPLES, WIDTH, device="cuda")
        state: Any = cell(data)  # workspaces of the products, too
        before = tracer.allocator.allocated_bytes
        following = cell(data, state)
        assert tracer.allocator.allocated_bytes - before == states * STATE
        del state, following, cell
