"""Recurrent layers on meta tensors as one cuDNN call each, as CUDA runs them.

Without this the meta device unrolls them step by step. Follows aten/src/ATen/native/cudnn/RNN.cpp
(and cudnn/AutocastRNN.cpp for autocast, which casts all weights into one flat buffer). What cuDNN
keeps between forward and backward it does not document; the sizes here are those of the recorded
LSTM trainings: for each layer its gates and cell states, and the outputs between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofit.memory.tracer import Order
from autofit.prediction import autocast
from autofit.prediction.dispatch import beneath, emulate

aten: Any = torch.ops.aten

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_LSTM = 2


def _layer(name: str, overload: str) -> Callable[..., Any]:
    """The kernel of an operator such as lstm.input or gru.data (packed sequences)."""
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
        data, hidden, cell = map(autocast.in_lower_precision, (data, hidden, cell))
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
    """Casts of all weights, in one buffer; gradients flow back to each."""
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


def cudnn_rnn(args: Any) -> tuple[Any, Order]:
    """Stands in for `aten::_cudnn_rnn`: its results, and the order of allocations."""
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
    copied = [_nbytes(data)] if batch_first else []
    order: Order = [*copied, output, last_hidden, last_cell, workspace, reserve]
    visible = output.transpose(0, 1) if batch_first else output
    return (visible, last_hidden, last_cell, reserve, data.new_empty(0)), order


def cudnn_rnn_backward(args: Any) -> tuple[Any, Order]:
    """Stands in for `aten::_cudnn_rnn_backward`, likewise; weight gradients share one buffer."""
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
    order: Order = [_nbytes(hidden), _nbytes(hidden), _nbytes(data), _nbytes(output)]
    order += [of_data, of_hidden, *([of_cell] if of_cell is not None else []), workspace, None]
    order += [_nbytes(data), buffer, workspace] if mask[3] else []
    return (of_data, of_hidden, of_cell, gradients if mask[3] else []), order


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _row_bytes(data: torch.Tensor, width: int) -> int:
    """One value for every step, sample and hidden unit."""
    return data.numel() // data.shape[-1] * width * data.element_size()


def _workspace(weights: Sequence[torch.Tensor], gates_bytes: int) -> int:
    return gates_bytes + sum(4 * weight.numel() for weight in weights if weight.dim() > 1)


for _name in _MODES:
    for _overload in ("input", "data"):
        emulate(f"{_name}.{_overload}", _layer(_name, _overload))
