"""How memory is predicted: by rehearsal or by emulation, of one GPU or as one of several ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from autofit.emulation.build import check_can_build
from autofit.emulation.errors import EmulationUnavailable
from autofit.emulation.launch import MACHINE
from autofit.errors import InvalidRequest
from autofit.plan import Plan, check_count
from autofit.space import Space

if TYPE_CHECKING:
    from autofit.training.workload import Workload

METHODS = ("auto", "rehearse", "emulate")
NCCL_UNKNOWN = "not known, 0 counted"
"""What NCCL holds on a rank: it lies outside of torch, and no measurement says how much."""


def method_taken(method: str, model: Any) -> str:
    """Return "rehearse" or "emulate": the method, or what "auto" means here for this model.

    Raises:
        InvalidRequest: there is no such method.
        EmulationUnavailable: emulation was asked for, and what it takes is missing.
    """
    if method not in METHODS:
        raise InvalidRequest(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method == "emulate":
        check_can_build()
    if method != "auto":
        return method
    try:
        check_can_build()
    except EmulationUnavailable:
        return "rehearse"
    return "rehearse" if _has_real_gpu() or _lies_on_meta(model) else "emulate"


def words_of(method: str, computed_values: bool | None) -> str:
    """Return how a verdict or a prediction was made, for a reader."""
    if method == "probe":
        return "a probe: run on the device"
    if method == "rehearse":
        return "a rehearsal on torch's meta device"
    values = "computing values" if computed_values else "computing no values"
    return f"a run on an emulated GPU, {values}"


def plan_of_ranks(workload: Workload, plan: Plan | None, world_size: int | None) -> Plan:
    """Return the plan for so many ranks; None: the baseline, and as many as the plan says.

    Raises:
        InvalidRequest: the plan says another number, or its samples cannot be shared by so many.
    """
    if plan is None:
        ranks = 1 if world_size is None else check_count("world_size", world_size)
        global_batch = workload.global_batch
        return Space({}, workload.sample_batch_size, global_batch, world_size=ranks).baseline
    if world_size is None or check_count("world_size", world_size) == plan.world_size:
        return plan
    if plan.world_size > 1:
        raise InvalidRequest(
            f"world_size={world_size}, but the plan is of {plan.world_size} ranks: leave one out"
        )
    return plan.on(world_size)


def method_of_ranks(method: str, world_size: int) -> str:
    """Return the method for so many ranks: several are rehearsed.

    Raises:
        InvalidRequest: another method was asked for.
    """
    if world_size == 1 or method == "rehearse":
        return method
    if method == "auto":
        return "rehearse"
    raise InvalidRequest(
        f"method={method!r} runs one GPU alone: {world_size} ranks are rehearsed, so leave method "
        'out, or give "rehearse"'
    )


def _has_real_gpu() -> bool:
    import torch  # where a verdict is only read, it is not needed

    return torch.cuda.is_available() and MACHINE not in os.environ


def _lies_on_meta(model: Any) -> bool:
    """Whether a live model has no values: it can be rehearsed, but not run."""
    import torch

    return isinstance(model, torch.nn.Module) and any(p.is_meta for p in model.parameters())
