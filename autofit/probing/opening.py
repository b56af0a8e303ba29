"""From the name of an isolation to a prober that holds a workload."""

from __future__ import annotations

from autofit.errors import InvalidRequest
from autofit.probing.client import WorkerProber
from autofit.probing.inprocess import InProcessProber
from autofit.probing.prober import WorkloadProber
from autofit.strategy import Strategy
from autofit.workload import Workload


def open_prober(
    workload: Workload,
    strategies: tuple[Strategy, ...],
    *,
    device: str | None,
    vram_budget: str | float | None,
    seed: int,
    isolation: str,
) -> WorkloadProber:
    """The prober that `isolation` names.

    Raises:
        InvalidRequest: no such isolation.
    """
    kinds: dict[str, type[WorkerProber] | type[InProcessProber]] = {
        "process": WorkerProber,
        "inprocess": InProcessProber,
    }
    if isolation not in kinds:
        raise InvalidRequest(f"isolation must be one of {', '.join(kinds)}, got {isolation!r}")
    kind = kinds[isolation]
    return kind(workload, strategies, device=device, vram_budget=vram_budget, seed=seed)
