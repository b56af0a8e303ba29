"""LSTM and GRU cells, one step at a time, as CUDA runs them: two products and one fused kernel.

On other devices a cell is made of a dozen operators, which keep less for the backward pass than
CUDA's kernel does: both products, and a workspace of the gates (`LSTMCell` and `GRUCell` in
aten/src/ATen/native/RNN.cpp, the kernels in native/cuda/RNN.cu).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autofit.memory.tracer import Order
from autofit.prediction import autocast
from autofit.prediction.dispatch import beneath, emulate

aten: Any = torch.ops.aten

_KEPT_BY_GRU = 5
"""Values that a GRU cell's kernel keeps for each sample and hidden unit."""


def _lstm_cell(
    data: torch.Tensor,
    state: Sequence[torch.Tensor],
    of_data: torch.Tensor,
    of_hidden: torch.Tensor,
    data_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> Any:
    cell = data, list(state), of_data, of_hidden, data_bias, hidden_bias
    with beneath():
        if not data.is_meta:
            return aten.lstm_cell(*cell)
        data, (hidden, memory), of_data, of_hidden, *biases = _cast(cell)
        products = aten.matmul(data, of_data.t()), aten.matmul(hidden, of_hidden.t())
        return tuple(aten._thnn_fused_lstm_cell(*products, memory, *biases)[:2])


def _gru_cell(
    data: torch.Tensor,
    hidden: torch.Tensor,
    of_data: torch.Tensor,
    of_hidden: torch.Tensor,
    data_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> Any:
    cell = data, hidden, of_data, of_hidden, data_bias, hidden_bias
    with beneath():
        if not data.is_meta:
            return aten.gru_cell(*cell)
        data, hidden, of_data, of_hidden, *biases = _cast(cell)
        products = aten.matmul(data, of_data.t()), aten.matmul(hidden, of_hidden.t())
        return aten._thnn_fused_gru_cell(*products, hidden, *biases)[0]


def _cast(cell: Any) -> Any:
    return autocast.in_lower_precision(cell) if autocast.is_on() else cell


def fused_lstm_cell(args: Any) -> tuple[Any, Order]:
    """Stands in for `aten::_thnn_fused_lstm_cell`: both states, and what backward needs."""
    gates, memory = args[0], args[2]
    kept, *states = torch.empty_like(gates), torch.empty_like(memory), torch.empty_like(memory)
    return (*states, kept), [kept, *states]


def fused_gru_cell(args: Any) -> tuple[Any, Order]:
    """Stands in for `aten::_thnn_fused_gru_cell`: the hidden state, and what backward needs."""
    hidden = args[2]
    kept = hidden.new_empty(hidden.shape[0], _KEPT_BY_GRU * hidden.shape[1])
    following = torch.empty_like(hidden)
    return (following, kept), [kept, following]


def fused_gru_cell_backward(args: Any) -> tuple[Any, Order]:
    """Stands in for `aten::_thnn_fused_gru_cell_backward`: gradients of products, state, biases."""
    gradient, kept, has_bias = args
    gates = kept.shape[0], 3 * kept.shape[1] // _KEPT_BY_GRU
    of_products = kept.new_empty(gates), kept.new_empty(gates)
    of_hidden = torch.empty_like(gradient)
    of_biases = [kept.new_empty(gates[1]) if has_bias else None for _ in range(2)]
    return (*of_products, of_hidden, *of_biases), [*of_products, of_hidden]


emulate("lstm_cell", _lstm_cell)
emulate("gru_cell", _gru_cell)
