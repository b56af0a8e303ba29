"""Recurrent layers and cells on meta tensors as CUDA runs them: fused.

A layer is one cuDNN call (aten/src/ATen/native/cudnn/RNN.cpp; cudnn/AutocastRNN.cpp casts all
weights into one flat buffer), where the meta device unrolls it step by step. cuDNN does not
document what it keeps between forward and backward; the sizes are those of the recorded LSTM
trainings: for each layer its gates and cell states, and the outputs between layers.

A cell is two products and a fused kernel, which keeps both products and a workspace of the gates
(`LSTMCell` and `GRUCell` in aten/src/ATen/native/RNN.cpp, the kernels in native/cuda/RNN.cu).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofit.memory.tracer import Order
from autofit.prediction.cuda import autocast
from autofit.prediction.cuda.autocast import beneath

aten: Any = torch.ops.aten

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""As cuDNN numbers them."""
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_KEPT_BY_GRU = 5
"""Values that a GRU cell's kernel keeps for each sample and hidden unit."""


def _layer(name: str, overload: str) -> Callable[..., Any]:
    """Return the kernel of an operator such as lstm.input or gru.data (packed sequences)."""
    plain = getattr(getattr(aten, name), overload)
    packed = overload == "data"

    def kernel(*args: Any) -> Any:
        data, batch_sizes = args[0], tuple(args[1].tolist()) if packed else ()
        rest = args[2:] if packed else args[1:]
        with beneath():
            if not data.is_meta:
                return plain(*args)
            return _run(name, data, batch_sizes, *rest)

    return kernel


def _run(
    name: str,
    data: torch.Tensor,
    batch_sizes: tuple[int, ...],
    state: Any,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    hidden, cell = (state[0], state[1]) if name == "lstm" else (state, None)
    if autocast.is_on():
        data, hidden, cell = autocast.lowered((data, hidden, cell))
        weights = _flattened(weights, torch.get_autocast_dtype("cuda"))
    width = weights[0].shape[0] // _GATES[_MODES[name]]
    output, last_hidden, last_cell, _, _ = aten._cudnn_rnn(
        data,
        weights,
        4 if has_biases else 2,
        None,
        hidden,
        cell,
        _MODES[name],
        width,
        hidden.shape[2] if hidden.shape[2] != width else 0,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        batch_sizes,
        None,
    )
    return (output, last_hidden, last_cell) if name == "lstm" else (output, last_hidden)


def _flattened(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return casts of all weights, in one buffer; gradients flow back to each."""
    if all(weight.dtype == dtype for weight in weights):
        return list(weights)
    buffer = torch.zeros(sum(weight.numel() for weight in weights), dtype=dtype, device="meta")
    casts, offset = [], 0
    for weight in weights:
        cast = torch.empty(0, dtype=dtype, device="meta")
        cast.set_(buffer.untyped_storage(), offset, weight.shape, weight.stride())
        casts.append(cast.copy_(weight))
        offset += weight.numel()
    return casts


def _cudnn_rnn(args: Any) -> tuple[Any, Order]:
    data, weights, _, _, hidden, cell, mode, width, _, layers, batch_first, _, train, both = args[
        :14
    ]
    batch_sizes = args[14]
    directions = 2 if both else 1
    batch_first = batch_first and not batch_sizes
    steps = data.transpose(0, 1) if batch_first else data
    output = data.new_empty(*steps.shape[:-1], hidden.shape[2] * directions)
    last_hidden = torch.empty_like(hidden)
    last_cell = torch.empty_like(cell) if cell is not None else data.new_empty(0)
    row_bytes = _row_bytes(data, width * directions)
    kept = layers * (_GATES[mode] + 1) + layers - 1
    reserve_bytes = kept * row_bytes + 256 if train else 0
    reserve = torch.empty(reserve_bytes, dtype=torch.uint8, device="meta")
    workspace = _workspace(weights, layers * _GATES[mode] * row_bytes)
    copied = [data.nbytes] if batch_first else []
    order: Order = [*copied, output, last_hidden, last_cell, workspace, reserve]
    visible = output.transpose(0, 1) if batch_first else output
    return (visible, last_hidden, last_cell, reserve, data.new_empty(0)), order


def _cudnn_rnn_backward(args: Any) -> tuple[Any, Order]:
    """Return the gradients; those of the weights share one buffer."""
    data, weights, _, _, hidden, cell, output = args[:7]
    mode, width, layers, both, mask = args[10], args[11], args[13], args[17], args[-1]
    buffer = data.new_empty(sum(weight.numel() for weight in weights))
    gradients, offset = [], 0
    for weight in weights:
        gradients.append(buffer[offset : offset + weight.numel()].view(weight.shape))
        offset += weight.numel()
    of_data, of_hidden = torch.empty_like(data), torch.empty_like(hidden)
    of_cell = torch.empty_like(cell) if cell is not None else None
    row_bytes = _row_bytes(data, width * (2 if both else 1))
    workspace = _workspace(weights, layers * _GATES[mode] * row_bytes)
    order: Order = [hidden.nbytes, hidden.nbytes, data.nbytes, output.nbytes]
    order += [of_data, of_hidden, *([of_cell] if of_cell is not None else []), workspace, None]
    order += [data.nbytes, buffer, workspace] if mask[3] else []
    return (of_data, of_hidden, of_cell, gradients if mask[3] else []), order


def _row_bytes(data: torch.Tensor, width: int) -> int:
    """Return the bytes of one value for every step, sample and hidden unit."""
    return data.numel() // data.shape[-1] * width * data.element_size()


def _workspace(weights: Sequence[torch.Tensor], gates_bytes: int) -> int:
    return gates_bytes + sum(4 * weight.numel() for weight in weights if weight.dim() > 1)


def _lstm_cell(
    data: torch.Tensor,
    state: Sequence[torch.Tensor],
    of_data: torch.Tensor,
    of_hidden: torch.Tensor,
    *biases: torch.Tensor | None,
) -> Any:
    cell = data, list(state), of_data, of_hidden, *biases
    with beneath():
        if not data.is_meta:
            return aten.lstm_cell(*cell)
        data, (hidden, memory), of_data, of_hidden, *biases = autocast.lowered(cell)
        products = aten.matmul(data, of_data.t()), aten.matmul(hidden, of_hidden.t())
        return tuple(aten._thnn_fused_lstm_cell(*products, memory, *biases)[:2])


def _gru_cell(
    data: torch.Tensor,
    hidden: torch.Tensor,
    of_data: torch.Tensor,
    of_hidden: torch.Tensor,
    *biases: torch.Tensor | None,
) -> Any:
    cell = data, hidden, of_data, of_hidden, *biases
    with beneath():
        if not data.is_meta:
            return aten.gru_cell(*cell)
        data, hidden, of_data, of_hidden, *biases = autocast.lowered(cell)
        products = aten.matmul(data, of_data.t()), aten.matmul(hidden, of_hidden.t())
        return aten._thnn_fused_gru_cell(*products, hidden, *biases)[0]


def _fused_lstm_cell(args: Any) -> tuple[Any, Order]:
    gates, memory = args[0], args[2]
    kept, *states = torch.empty_like(gates), torch.empty_like(memory), torch.empty_like(memory)
    return (*states, kept), [kept, *states]


def _fused_gru_cell(args: Any) -> tuple[Any, Order]:
    hidden = args[2]
    kept = hidden.new_empty(hidden.shape[0], _KEPT_BY_GRU * hidden.shape[1])
    following = torch.empty_like(hidden)
    return (following, kept), [kept, following]


def _fused_gru_cell_backward(args: Any) -> tuple[Any, Order]:
    """Return the gradients of both products, of the state and of the biases."""
    gradient, kept, has_bias = args
    gates = kept.shape[0], 3 * kept.shape[1] // _KEPT_BY_GRU
    of_products = kept.new_empty(gates), kept.new_empty(gates)
    of_hidden = torch.empty_like(gradient)
    of_biases = [kept.new_empty(gates[1]) if has_bias else None for _ in range(2)]
    return (*of_products, of_hidden, *of_biases), [*of_products, of_hidden]


KERNELS: dict[str, Callable[..., Any]] = {
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    **{f"{name}.{kind}": _layer(name, kind) for name in _MODES for kind in ("input", "data")},
}
STAND_INS: dict[str, Callable[[Any], tuple[Any, Order]]] = {
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
    "_thnn_fused_lstm_cell": _fused_lstm_cell,
    "_thnn_fused_gru_cell": _fused_gru_cell,
    "_thnn_fused_gru_cell_backward": _fused_gru_cell_backward,
}
"""From the positional arguments: the results, and the order of allocations."""
