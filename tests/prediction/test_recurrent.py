"""Recurrent layers as one call: the same shapes as on the CPU, and gradients for all weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.prediction.cuda_tracer import CudaTracer
from autofit.prediction.gpus import find_gpu
from autofit.prediction.rehearsal import stage

KINDS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 5}),
    (nn.LSTM, {"bias": False}),
    (nn.GRU, {"num_layers": 2, "batch_first": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.RNN, {}),
]


def shapes(value: Any) -> list[tuple[int, ...]]:
    if isinstance(value, torch.Tensor):
        return [tuple(value.shape)]
    return [shape for part in value for shape in shapes(part)]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_have_the_shapes_of_the_cpu(
    kind: type[nn.RNNBase], options: dict[str, Any], autocast: bool
) -> None:
    layer, x = kind(6, 8, **options), torch.randn(3, 4, 6)  # type: ignore[arg-type]  # torch's own signature
    expected = shapes(layer(x))
    tracer = CudaTracer(find_gpu("A100"))
    with stage(tracer.gpu, tracer):
        on_device = layer.cuda()
        with torch.autocast("cuda", enabled=autocast):
            results = on_device(torch.randn(3, 4, 6, device="cuda"))
        assert shapes(results) == expected
        results[0].float().sum().backward()
        for parameter in on_device.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.dtype == parameter.dtype
        del results, on_device


def test_packed_sequences() -> None:
    tracer = CudaTracer(find_gpu("A100"))
    with stage(tracer.gpu, tracer):
        layer = nn.LSTM(6, 8, device="cuda")
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.randn(5, 3, 6, device="cuda"), torch.tensor([5, 3, 2])
        )
        output, (hidden, _) = layer(packed)
        assert tuple(output.data.shape) == (10, 8)
        assert tuple(hidden.shape) == (1, 3, 8)
        output.data.sum().backward()
        del layer, packed, output, hidden


def test_sequences_in_any_order_are_packed_and_padded_again() -> None:
    tracer = CudaTracer(find_gpu("A100"))
    with stage(tracer.gpu, tracer):
        data, lengths = torch.randn(5, 3, 6, device="cuda"), torch.tensor([2, 5, 3])
        packed = nn.utils.rnn.pack_padded_sequence(data, lengths, enforce_sorted=False)
        padded, found = nn.utils.rnn.pad_packed_sequence(packed)
        assert padded.shape == data.shape
        assert torch.equal(found, lengths)
        del data, packed, padded
