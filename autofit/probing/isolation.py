"""From the name of an isolation to a prober that holds a workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autofit.devices.base import check_budget
from autofit.devices.open import device_meant
from autofit.errors import InvalidRequest
from autofit.probing.inprocess import InProcessProber
from autofit.probing.prober import Target, WorkloadProber
from autofit.probing.worker_client import WorkerProber
from autofit.strategy import Strategy
from autofit.training.workload import Workload

_LARGEST_SEED = 2**32 - 1


def open_prober(
    workload: Workload, strategies: Sequence[Strategy], target: Target
) -> WorkloadProber:
    """Open the prober that `target.isolation` names.

    Raises:
        InvalidRequest: no such isolation, device or seed, or what is no budget; nothing was
            started by then.
    """
    kinds: dict[Any, type[WorkerProber] | type[InProcessProber]] = {
        "process": WorkerProber,
        "inprocess": InProcessProber,
    }
    if target.isolation not in list(kinds):  # a list asks for no hash, and it may be anything
        raise InvalidRequest(
            f"isolation must be one of {', '.join(kinds)}, got {target.isolation!r}"
        )
    live = workload.model if isinstance(workload.model, torch.nn.Module) else None
    meant = device_meant(target.device, live)
    check_budget(target.vram_budget)
    _check_seed(target.seed)
    _check_has_values(workload)
    return kinds[target.isolation](
        workload, strategies, device=meant, vram_budget=target.vram_budget, seed=target.seed
    )


def _check_has_values(workload: Workload) -> None:
    """A live model on the meta device can be rehearsed, and not run."""
    model = workload.model
    if isinstance(model, torch.nn.Module) and any(p.is_meta for p in model.parameters()):
        raise InvalidRequest(
            "the model lies on the meta device and has no values to train: give a function that "
            "builds it, or a model on the CPU"
        )


def _check_seed(seed: Any) -> None:
    whole = isinstance(seed, int) and not isinstance(seed, bool)
    if not (whole and 0 <= seed <= _LARGEST_SEED):
        raise InvalidRequest(f"seed must be a whole number from 0 to {_LARGEST_SEED}, got {seed!r}")
