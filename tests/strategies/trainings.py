"""What tests of strategies share: a training under settings, and what is offered for a workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autofit import Plan, Strategy, Training, Workload
from autofit.plan import ResolvedPlan
from autofit.registry import collect_dimensions
from autofit.strategy import Capabilities, World
from autofit.testing import PlainContext
from autofit.training.loss import Recipe

HOPPER = Capabilities("cuda", bfloat16=True, float16=True, tf32=True, compute_capability=(9, 0))


def training(
    model: nn.Module,
    *strategies: Strategy,
    plan: Plan | None = None,
    payloads: dict[str, Any] | None = None,
    optimizer: Any = None,
    device: str | torch.device = "cpu",
    recipe: Recipe | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Training:
    """Return a training of a model.

    Args:
        model: on the device.
        strategies: that apply the plan.
        plan: of four samples, with `settings`, if it is not given.
        payloads: of the plan's values.
        optimizer: of the model; SGD at a rate of 0.1 if it is not given.
        device: where it trains.
        recipe: how the loss is computed; the mean of the outputs if it is not given.
        settings: values by name.
    """
    resolved = ResolvedPlan(plan or Plan(4, settings=settings or {}), payloads or {}, strategies)
    by = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    return Training(model, by, recipe or Recipe(), resolved, device=torch.device(device))


def offered(
    strategy: Strategy,
    setting: str,
    build: Callable[[], Workload],
    device: str = "cpu",
    capabilities: Capabilities | None = None,
    ranks: int = 1,
) -> tuple[Any, list[str]]:
    """Return the dimension that a strategy offers for a workload, or None; and what it notes."""
    context = PlainContext(build, device, capabilities)
    context._builder = replace(context._builder, world=World(size=ranks))
    return collect_dimensions([strategy], context).get(setting), context.notes


def in_place(block: nn.Module, **given: Any) -> nn.Module:
    block.compile(**given)
    return block


def by_its_forward(block: nn.Module, **given: Any) -> nn.Module:
    vars(block)["forward"] = torch.compile(block.forward, **given)
    return block


WAYS_TO_COMPILE: tuple[Any, ...] = (torch.compile, in_place, by_its_forward)
"""Each compiles a part of a model; arguments besides are those of `torch.compile`."""
