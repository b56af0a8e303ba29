"""A small classifier, a labelled batch for it, and a session of it on the CPU device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autofit.devices.cpu import CpuDevice
from autofit.probing.session import Session
from autofit.training.workload import Workload

CROSS_ENTROPY = nn.functional.cross_entropy


def session_of(make: Callable[[], Workload], strategies: Any = ()) -> Session:
    """Return a session of the workload on the CPU device."""
    return Session(make, strategies, CpuDevice())


def classifier(*middle: nn.Module) -> nn.Module:
    """Return a model from 6 features to 4 classes, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.Linear(16, 4))


def labelled(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features and classes, the same each time."""
    dice = torch.Generator().manual_seed(1)
    return (
        torch.randn(samples, 6, generator=dice),
        torch.randint(0, 4, (samples,), generator=dice),
    )
