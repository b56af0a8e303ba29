"""A workload for commands."""

import torch

from autofit import Workload


def linear() -> Workload:
    return Workload(lambda: torch.nn.Linear(16, 16), torch.randn(4, 16))
