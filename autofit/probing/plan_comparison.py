"""Two plans of one workload, run on the same samples on its device, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from autofit.batching import Batch
from autofit.errors import InvalidRequest
from autofit.plan import Plan
from autofit.probing.comparison import Comparison, Gradients, compare, gradients
from autofit.probing.scrub import scrub
from autofit.probing.workbench import Workbench

Pass: TypeAlias = tuple[Plan, Mapping[str, Any], int]
"""A plan, what its settings mean to their strategies, and a seed."""


def compare_plans(
    bench: Workbench,
    first: Plan,
    second: Plan,
    payloads: Sequence[Mapping[str, Any]],
    samples: int,
) -> Comparison:
    """Loss and gradients of two plans on the same samples.

    Raises:
        InvalidRequest: the workload has a train_step, whose gradients cannot be looked at.
        Exception: whatever the model or the device raises.
    """
    if bench.fresh_workload().train_step is not None:
        raise InvalidRequest("train_step hides its gradients: plans cannot be compared")
    seeds = (bench.seed, bench.seed)
    return compare_passes(bench, list(zip((first, second), payloads, seeds, strict=True)), samples)


def compare_passes(bench: Workbench, passes: Sequence[Pass], samples: int) -> Comparison:
    """Loss and gradients of two passes over the same samples; raises as `compare_plans` does."""
    batch = bench.fresh_workload().batch(samples)  # once: a function may make another each time
    try:
        return compare(*(_pass(bench, *each, batch, calm=True) for each in passes))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # some models have a loss in training mode only
        scrub(error)
    return compare(*(_pass(bench, *each, batch, calm=False) for each in passes))


def _pass(
    bench: Workbench,
    plan: Plan,
    payloads: Mapping[str, Any],
    seed: int,
    batch: Batch,
    *,
    calm: bool,
) -> Gradients:
    bench.reclaim()
    with bench.training(bench.fresh_workload(), plan, payloads) as training:
        return gradients(training, batch, seed=seed, calm=calm)
