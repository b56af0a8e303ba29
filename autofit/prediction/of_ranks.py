"""The plan of one of several ranks, and what a prediction cannot know of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.errors import InvalidArgument
from autofit.plan import Plan, check_count

if TYPE_CHECKING:
    from autofit.training.workload import Workload

NCCL_UNKNOWN = "unknown, counted as 0"
"""What NCCL holds on a rank: it lies outside of torch, and no measurement says how much."""


def plan_of_ranks(workload: Workload, plan: Plan | None, world_size: int | None) -> Plan:
    """Return the plan for so many ranks; None: the baseline, and as many as the plan says.

    Raises:
        InvalidArgument: the plan says another number, or its samples cannot be shared by so many.
    """
    if plan is None:
        return workload.plan(
            world_size=1 if world_size is None else check_count("world_size", world_size)
        )
    if world_size is None or check_count("world_size", world_size) == plan.world_size:
        return plan
    if plan.world_size > 1:
        raise InvalidArgument(
            f"world_size={world_size}, but the plan is of {plan.world_size} ranks: leave one out"
        )
    return plan.on(world_size)
