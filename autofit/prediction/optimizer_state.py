"""What an optimizer's state takes, and what other ways to hold or to do without it would take.

In 8 bits, a tensor of the state as large as its parameter takes a byte a value and four bytes for
each block of 256, small ones as before (Dettmers et al., 2021, arXiv 2110.02861, section 2, as
torchao and bitsandbytes have it). Adafactor holds a sum for each row and column of the last two
dimensions, and all values of a vector (Shazeer and Stern, 2018, arXiv 1804.04235, algorithm 4, as
`torch.optim.Adafactor`). Lion holds one moment (Chen et al., 2023, arXiv 2302.06675, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import TYPE_CHECKING, Any

import torch

from autofit.memory.tracer import tensors_in
from autofit.training.optimizers import by_name
from autofit.training.training import Training

if TYPE_CHECKING:
    from autofit.probing.session import Session

BLOCK = 256
"""Values that share a scale of four bytes."""
LEAST_VALUES = 4096
"""The fewest values of a tensor that is held in codes."""


def state_costs(session: Session) -> dict[str, Any]:
    """Return the bytes of the state after a plain step of two samples, and those of other ways.

    Two, because BatchNorm refuses to normalize over one value a channel.

    Counts that an optimizer keeps of its steps are left out.

    Raises:
        Exception: whatever the device or the user's code raises.
    """
    builder = session.builder
    builder.reclaim()
    try:
        return dict(builder.profile(_costs, 2))
    finally:
        builder.reclaim_or_not()


def _costs(training: Training, batch: Any) -> dict[str, Any]:
    training.step(batch)
    optimizers = by_name(training.optimizer).values()
    state = in_8_bits = parameters = adafactor = lion = 0
    for parameter, tensors in _states(optimizers):
        parameters += parameter.nbytes
        adafactor += adafactor_values(parameter.shape) * parameter.element_size()
        lion += parameter.nbytes
        for tensor in tensors:
            state += tensor.nbytes
            in_8_bits += (
                bytes_in_8_bits(tensor) if tensor.shape == parameter.shape else (tensor.nbytes)
            )
    return {
        "optimizer": " and ".join(dict.fromkeys(type(each).__name__ for each in optimizers)),
        "parameter_bytes": parameters,
        "state_bytes": state,
        "bytes_in_8_bits": in_8_bits,
        "adafactor_bytes": adafactor,
        "lion_bytes": lion,
    }


def _states(optimizers: Any) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield each trained parameter with the tensors of its state."""
    seen: set[int] = set()
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                held = tensors_in(dict(optimizer.state.get(parameter, {})))
                yield parameter, [tensor for tensor in held if tensor.dim()]


def bytes_in_8_bits(tensor: torch.Tensor) -> int:
    """Return what a tensor of the state takes in codes; what is small or no number stays."""
    if tensor.numel() < LEAST_VALUES or not tensor.is_floating_point():
        return tensor.nbytes
    return tensor.numel() + 4 * ceil(tensor.numel() / BLOCK)


def adafactor_values(shape: torch.Size) -> int:
    """Return the values of Adafactor's state of a parameter; see the module."""
    if len(shape) < 2:
        return shape.numel()
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
