"""Recurrent layers as one call: the same layouts as on the CPU, and gradients for all weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.prediction.cuda.tracer import CudaTracer

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 5}),
    (nn.LSTM, {"bias": False}),
    (nn.GRU, {"num_layers": 2, "batch_first": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.RNN, {}),
    *((cell, {"bias": bias}) for cell in (nn.LSTMCell, nn.GRUCell) for bias in (False, True)),
]


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors(part)]


def layouts(value: Any) -> list[tuple[int, ...]]:
    return [(*tensor.shape, *tensor.stride()) for tensor in tensors(value)]


@pytest.mark.usefixtures("tracer")
@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_lie_as_on_the_cpu(
    kind: Any, options: dict[str, Any], autocast: bool
) -> None:
    layer, x = kind(6, 8, **options), torch.randn(3, 4, 6)
    if issubclass(kind, nn.RNNCellBase):
        x = x[0]
    expected = layouts(layer(x))
    on_device = layer.cuda()
    with torch.autocast("cuda", enabled=autocast):
        results = on_device(x.cuda())
    assert layouts(results) == expected
    assert {each.dtype for each in tensors(results)} == {torch.float16 if autocast else torch.float}
    tensors(results)[0].float().sum().backward()  # type: ignore[no-untyped-call]  # torch's
    for parameter in on_device.parameters():
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, parameter.dtype)


@pytest.mark.usefixtures("tracer")
def test_packed_sequences() -> None:
    layer = nn.LSTM(6, 8, device="cuda")
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(5, 3, 6, device="cuda"), torch.tensor([5, 3, 2])
    )
    output, (hidden, _) = layer(packed)
    assert (tuple(output.data.shape), tuple(hidden.shape)) == ((10, 8), (1, 3, 8))
    output.data.sum().backward()


SAMPLES, WIDTH = 256, 128
STATE = SAMPLES * WIDTH * 4


@pytest.mark.parametrize(
    ("kind", "states"), [(nn.LSTMCell, 4 + 4 + 4 + 2), (nn.GRUCell, 3 + 3 + 5 + 1)]
)
def test_both_products_and_the_gates_are_kept(kind: Any, states: int, tracer: CudaTracer) -> None:
    """In states: the products, the kernel's workspace and what it returns (RNN.cu)."""
    cell, data = kind(WIDTH, WIDTH, device="cuda"), torch.randn(SAMPLES, WIDTH, device="cuda")
    state: Any = cell(data)  # workspaces of the products, too
    before = tracer.allocator.allocated_bytes
    following = cell(data, state)
    assert tracer.allocator.allocated_bytes - before == states * STATE
    del following
