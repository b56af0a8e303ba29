"""How much a plan's optimizer step changes the parameters.

A plan that never updates trains nothing, and equal gradients say nothing of what a strategy does to
the update.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch

from autofit.equivalence.comparison import distance
from autofit.plan import ResolvedPlan
from autofit.training.builder import TrainingBuilder

MOST_STEPS = 20
"""Without any change, before none is expected: float16 leaves some out until its scale fits."""


def size_of_update(builder: TrainingBuilder, resolved: ResolvedPlan, samples: int) -> float:
    """Return the norm of the change of all parameters by the first step that changes them.

    0: none of `MOST_STEPS` did.

    Raises:
        Exception: whatever the model or the device raises.
    """
    builder.reclaim()
    workload = builder.fresh_workload()
    batch = workload.batch(samples)
    with builder.training(workload, resolved) as training, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another number of samples than the plan's
        return first_change(training.plain_model, lambda: training.step(batch), MOST_STEPS)


def first_change(model: torch.nn.Module, step: Callable[[], object], most_steps: int) -> float:
    """Return the norm of the change of all parameters by the first step that changes them.

    0: none of `most_steps` did.
    """
    before = _on_host(model)
    for _ in range(most_steps):
        step()
        if size := math.hypot(*map(distance, before, _on_host(model))):
            return size
    return 0.0


def versions(model: torch.nn.Module) -> list[int]:
    """Return how often each parameter was written, as autograd counts it: not through `.data`."""
    return [getattr(parameter, "_version", 0) for parameter in model.parameters()]


def _on_host(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
