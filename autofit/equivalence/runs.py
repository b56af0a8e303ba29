"""What a few optimizer steps did, and where two such runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """What some optimizer steps did: losses and gradients of each, parameters after the last."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return copies({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differences_between(plain: Run, run: Run, tolerance: float) -> Iterator[str]:
    """Where two runs differ by more than the tolerance, the first place of each kind."""
    steps = zip(plain.losses, run.losses, plain.gradients, run.gradients, strict=True)
    for number, (loss1, loss2, gradients1, gradients2) in enumerate(steps, start=1):
        if not _alike(loss1, loss2, tolerance):
            yield f"the loss of step {number} is {loss2.item()!r}, not {loss1.item()!r}"
            return
        for name, gradient in gradients1.items():
            if name not in gradients2 or not _alike(gradient, gradients2[name], tolerance):
                yield f"the gradient of {name} differs in step {number}"
                return
    for name, values in plain.parameters.items():
        if not _alike(values, run.parameters[name], tolerance):
            yield f"{name} differs after the last step"
            return


def _alike(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if tolerance == 0.0:
        return torch.equal(one, other)
    apart = torch.where(one == other, 0.0, one.double() - other.double())  # -inf in a mask is equal
    size = torch.where(one.isfinite(), one.double(), 0.0).norm()
    return bool(apart.norm() <= tolerance * size + 1e-12)
