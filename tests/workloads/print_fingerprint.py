"""Print the fingerprint of a workload whose parts have no stable order or address."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autofit.devices.cpu import CpuDevice
from autofit.torch_flags import computing
from autofit.training.fingerprint import fingerprint
from autofit.training.workload import Workload

net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
net.register_forward_hook(lambda m, i, o: o * 2)
parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4), nn.BatchNorm1d(4)]
for part in parts:  # each holds a set of the others, which hold it
    part.peers = {other for other in parts if other is not part}  # type: ignore[assignment]
net.held = {*parts, torch.relu, len, "one", 2, 0.5, None, ("a", 1), frozenset({("b", 2), 3})}  # type: ignore[assignment]


def group(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": parameters, "key": object(), "of": {"a", "b"}}])


def difference(output: torch.Tensor, target: torch.Tensor, kinds: Any, where: Any) -> torch.Tensor:
    return (output - target).mean()


def before_step(model: nn.Module, optimizer: Any) -> None:
    assert type(model).__name__ not in {"x", "y", "z"}  # a frozenset in its code


workload = Workload(
    net,
    (torch.randn(3, 4), torch.randn(3, 4)),
    criterion=functools.partial(difference, kinds={"one", "two", "three"}, where=object()),
    optimizer=group,
    before_step=before_step,
)
model = workload.build_model()
optimizer = workload.build_optimizer(model)
print(fingerprint(workload, model, optimizer, CpuDevice().environment, computing()))
