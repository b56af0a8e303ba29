"""Operators in the form that CUDA runs them, where the meta device has another one.

`KERNELS` replaces composite operators that ask in C++ whether their argument lies on a GPU: meta
tensors would get the unfused form, which keeps more for the backward pass. `STAND_INS` gives
results and allocations of operators that the meta device lacks, `ORDERS` the allocations of others
in CUDA's order. `is_in_place` and `in_memory_of_all_losses` tell where CUDA's results share memory
that meta's do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from autofit.memory.tracer import Order
from autofit.prediction.cuda import autocast
from autofit.prediction.cuda.autocast import beneath
from autofit.torch_private import missing, suggest_memory_format

aten: Any = torch.ops.aten


def is_in_place(name: str, args: Any) -> bool:
    """Return whether `aten::<name>`, called by autograd, writes to its first argument on CUDA.

    Autograd avoids in-place operators where tensors are "like subclasses": meta tensors are, and
    every tensor is under a dispatch mode (ATen/TensorSubclassLikeUtils.h). On a GPU it adds to the
    first of the gradients that meet at a fork where nobody else holds it
    (`can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp).
    """
    if torch.is_grad_enabled() or not args or not isinstance(args[0], torch.Tensor):
        return False
    if not _has_counts() or torch._C._current_graph_task_id() == -1:
        return False
    return name == "add" and _can_accumulate(args[0], args[1])


def in_memory_of_all_losses(name: str, args: Any, result: torch.Tensor) -> torch.Tensor:
    """Return the mean or sum of losses in memory that holds the loss of every element.

    CUDA computes the loss of each element and then resizes the result to one number, which keeps
    the memory as long as the result lives (`TORCH_META_FUNC(mse_loss)` and others of BinaryOps.cpp
    and Loss.cpp, `binary_cross_entropy_out_cuda` of cuda/Loss.cu).
    """
    if name not in _KEEP_ALL_LOSSES or result.dim():
        return result
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # torch's
    return result.new_empty(shape).resize_(())


_KEEP_ALL_LOSSES = frozenset(
    ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
# C++ references to an argument that arrives here: autograd's, and three on the way from there.
_HELD_BY_AUTOGRAD_ALONE = 4


@cache
def _has_counts() -> bool:
    return missing("gradients in place") is None


def _can_accumulate(gradient: torch.Tensor, other: Any) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and gradient.is_meta
        and gradient.layout is other.layout is torch.strided
        and gradient._use_count() == _HELD_BY_AUTOGRAD_ALONE  # type: ignore[attr-defined]  # private
        and _is_only_view(gradient)
        and gradient.dtype == torch.result_type(gradient, other)
        and torch.broadcast_shapes(gradient.shape, other.shape) == gradient.shape  # type: ignore[no-untyped-call]  # torch's
        and _is_dense(gradient)
    )


def _is_only_view(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users == 2  # the tensor, and `storage` here


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie side by side, each once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _linear(
    data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the bias in place where the product is not fused with it (Linear.cpp).

    The operator itself avoids that where tensors are "like subclasses"; see `is_in_place`.
    """
    with beneath():
        bias, weight, data = autocast.lowered((bias, weight, data))  # C++ casts the last first
        is_fused = data.dim() == 2 or data.is_contiguous()
        if is_fused or bias is None or not (data.is_meta and bias.is_meta):
            return aten.linear(data, weight, bias)  # type: ignore[no-any-return]  # likewise
        return aten.matmul(data, weight.t()).add_(bias)  # type: ignore[no-any-return]  # likewise


def _dropout(data: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Run one kernel that keeps a mask of one byte an element (Dropout.cpp)."""
    with beneath():
        if not (data.is_meta and train and 0 < p < 1 and data.numel()):
            return aten.dropout(data, p, train)  # type: ignore[no-any-return]  # operators are untyped
        return aten.native_dropout(data, p, train)[0]  # type: ignore[no-any-return]  # likewise


def _batch_norm(
    data: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *others: Any,
) -> torch.Tensor:
    """Copy data with gaps for cuDNN; the copy is kept (`_batch_norm_impl_index`)."""
    with beneath():
        if data.is_meta and _suits_cudnn(data, weight, bias):
            data = data.contiguous(memory_format=suggest_memory_format(data))
        return aten.batch_norm(data, weight, bias, *others)  # type: ignore[no-any-return]  # likewise


def _suits_cudnn(
    data: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> bool:
    """Follow `_select_batch_norm_backend` of Normalization.cpp; other kernels take any strides."""
    if weight is None or bias is None or data.dim() < 3 or not torch.backends.cudnn.enabled:
        return False
    if data.dtype == torch.float16:
        return weight.dtype == torch.float32
    return torch.bfloat16 not in (data.dtype, weight.dtype)


def _group_norm(args: Any) -> tuple[Any, Order]:
    """Return a contiguous result, for which data of another layout is copied (group_norm.cpp).

    From torch 2.15 on CUDA keeps the layout, and takes less.
    """
    results = aten.native_group_norm(args[0].contiguous(), *args[1:])
    return results, [*_copies(args[:1]), *results]


def _group_norm_backward(args: Any) -> tuple[Any, Order]:
    """Return likewise; the gradient is copied too."""
    taken = (each.contiguous() for each in args[:2])
    results = aten.native_group_norm_backward(*taken, *args[2:])
    return results, [*_copies(args[:2]), *(each for each in results if each is not None)]


class _FusedRmsNorm(torch.autograd.Function):
    """Keeps what `_fused_rms_norm` keeps on CUDA: its input, and one number for each row."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, shape: Any, weight: Any) -> torch.Tensor:
        rows = data.numel() // max(prod(shape), 1)
        scale = torch.empty(rows, dtype=torch.float32, device="meta")
        ctx.save_for_backward(data, weight, scale)
        return torch.empty_like(data)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        data, weight, _ = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if weight is not None else None
        return torch.empty_like(data), None, of_weight


@cache
def _autocast_has_rms_norm() -> bool:
    """Up to torch 2.11 autocast leaves rms_norm alone, and bfloat16 data meets a float32 weight."""
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::rms_norm", "AutocastCUDA"
    )
    return has_kernel


def _rms_norm(
    data: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Fuse where data and weight have one type (layer_norm.cpp)."""
    with beneath():
        if _autocast_has_rms_norm() and autocast.is_on():
            data, weight = autocast.cast((data, weight), torch.float32)
        if not data.is_meta or (weight is not None and weight.dtype != data.dtype):
            return aten.rms_norm(data, normalized_shape, weight, eps)  # type: ignore[no-any-return]  # likewise
        return _FusedRmsNorm.apply(data, normalized_shape, weight)  # type: ignore[no-any-return, no-untyped-call]  # likewise


def _ctc_loss_of_tensors(
    log_probabilities: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    """Read lengths on the host as numbers, as CUDA does (LossCTC.cpp)."""
    with beneath():
        lengths: tuple[Any, Any] = input_lengths, target_lengths
        if log_probabilities.is_meta and not (input_lengths.is_meta or target_lengths.is_meta):
            lengths = input_lengths.tolist(), target_lengths.tolist()
        return aten.ctc_loss(log_probabilities, targets, *lengths, *options)  # type: ignore[no-any-return]  # likewise


def _ctc_loss(args: Any) -> tuple[Any, Order]:
    """Return the losses, and a table of 2 * (longest target) + 1 a step and sample (LossCTC.cu)."""
    log_probabilities, targets, _, target_lengths = args[:4]
    steps, samples = log_probabilities.shape[:2]
    width = 2 * _longest(targets, target_lengths) + 1
    losses = log_probabilities.new_empty(samples)
    table = log_probabilities.new_empty(samples, steps, width)
    return (losses, table), [table, losses]


def _ctc_loss_backward(args: Any) -> tuple[Any, Order]:
    """Return the gradient; a second table is needed meanwhile."""
    log_probabilities, table = args[1], args[6]
    gradient = torch.empty_like(log_probabilities)
    return gradient, [table.nbytes, gradient]


def _longest(targets: torch.Tensor, lengths: Any) -> int:
    """Return the longest target, or the most it can be where the lengths are unknown."""
    if targets.dim() == 2:  # padded to the longest
        return targets.shape[1]
    if isinstance(lengths, torch.Tensor):
        lengths = targets.shape if lengths.is_meta else lengths.tolist()
    return int(max(lengths, default=0))


def _grouped_product(args: Any) -> tuple[torch.Tensor, Order]:
    """Return products in groups; where an operand has two dimensions, groups divide one of them.

    The meta device takes them in bfloat16 alone, CUDA in float16 and float32 too
    (`_grouped_mm_cuda` of cuda/GroupedBlas.cpp).
    """
    left, right = args[:2]
    groups = []
    if left.dim() == right.dim():
        groups = [args[2].shape[0] if left.dim() == 2 else left.shape[0]]
    result = left.new_empty((*groups, left.shape[-2], right.shape[-1]))
    return result, [result]


# Recurrent layers and cells as CUDA runs them: fused. A layer is one cuDNN call
# (aten/src/ATen/native/cudnn/RNN.cpp; cudnn/AutocastRNN.cpp casts all weights into one flat
# buffer), where the meta device unrolls it step by step. cuDNN does not document what it keeps
# between forward and backward; the sizes are those of the recorded LSTM trainings: for each
# layer its gates and cell states, and the outputs between layers. A cell is two products and a
# fused kernel, which keeps both products and a workspace of the gates (`LSTMCell` and `GRUCell`
# in aten/src/ATen/native/RNN.cpp, the kernels in native/cuda/RNN.cu).

# As cuDNN numbers them.
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
# Values that a GRU cell's kernel keeps for each sample and hidden unit.
_KEPT_BY_GRU = 5


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


def _cell(plain: Any) -> Callable[..., Any]:
    """Return the kernel of lstm_cell, whose state is a list, or of gru_cell."""

    def kernel(data: torch.Tensor, state: Any, *weights: torch.Tensor | None) -> Any:
        with beneath():
            if not data.is_meta:
                return plain(data, state, *weights)
            data, state, of_data, of_hidden, *biases = autocast.lowered((data, state, *weights))
            hidden = state if isinstance(state, torch.Tensor) else state[0]
            products = aten.matmul(data, of_data.t()), aten.matmul(hidden, of_hidden.t())
            if hidden is state:
                return aten._thnn_fused_gru_cell(*products, hidden, *biases)[0]
            return tuple(aten._thnn_fused_lstm_cell(*products, state[1], *biases)[:2])

    return kernel


def _fused_lstm_cell(args: Any) -> tuple[Any, Order]:
    gates, memory = args[0], args[2]  # torch's own shape function needs biases
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


def _safe_softmax_order(args: Any, result: torch.Tensor) -> Order:
    """Look for rows of minus infinity after the softmax itself (SoftMax.cpp)."""
    rows = result.numel() // max(result.shape[args[1]], 1) if result.dim() else 1
    return [result, result.numel(), rows, 1]


def _copies(tensors: Any) -> list[int]:
    """Return the bytes of the copies of those that are not contiguous (layer_norm_kernel.cu)."""
    return [each.nbytes for each in tensors if not each.is_contiguous()]


KERNELS: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    "ctc_loss.Tensor": _ctc_loss_of_tensors,
    "dropout": _dropout,
    "gru_cell": _cell(aten.gru_cell),
    "linear": _linear,
    "lstm_cell": _cell(aten.lstm_cell),
    "rms_norm": _rms_norm,
    **{f"{name}.{kind}": _layer(name, kind) for name in _MODES for kind in ("input", "data")},
}
# From the positional arguments and what the meta device returns: the order of allocations.
ORDERS: dict[str, Callable[[Any, Any], Order]] = {
    "_safe_softmax": _safe_softmax_order,
    "native_dropout": lambda args, result: [result[1], result[0]],  # the mask first (Dropout.cu)
    "native_layer_norm": lambda args, result: [*_copies(args[:1]), *result],
    "native_layer_norm_backward": lambda args, result: [
        *_copies(args[:2]),
        *(each for each in result if each is not None),
    ],
}
# From the positional arguments: the results, and the order of allocations.
STAND_INS: dict[str, Callable[[Any], tuple[Any, Order]]] = {
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _ctc_loss_backward,
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
    "_grouped_mm": _grouped_product,
    "_thnn_fused_gru_cell": _fused_gru_cell,
    "_thnn_fused_gru_cell_backward": _fused_gru_cell_backward,
    "_thnn_fused_lstm_cell": _fused_lstm_cell,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
}
