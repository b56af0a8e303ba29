"""Reports whose best plan is chosen by a test, as a search of that workload would leave them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autofit import Dimension, Measurement, Outcome, Plan, Report, Trial, TrialKind, Workload
from autofit.registry import load_strategies
from autofit.report.record import Record, SearchSummary
from autofit.training.batch import describe
from autofit.training.samples import rows_of

DIMENSIONS = {
    "precision.dtype": Dimension(["default", "tf32", "bfloat16", "float16"]),
    "optimizer.implementation": Dimension(
        ["default", "for_loop", "foreach", "fused"],
        payloads={value: {"optimizers": [""]} for value in ("for_loop", "foreach", "fused")},
    ),
    "memory_format.layout": Dimension(["default", "channels_last"]),
    "compile.mode": Dimension(["off", "default", "reduce-overhead"]),
}
RAN = Measurement(
    Outcome.OK,
    step_times_s=[0.1] * 5,
    peak_allocated_bytes=2**20,
    peak_reserved_bytes=2**21,
    non_torch_bytes=0,
    allocator_retries=0,
    micro_batches_run=2,
    loss=0.5,
    seconds=1.0,
)


def report_of(workload: Workload, plan: Plan, units: tuple[str, ...] = ()) -> Report:
    """Return a report whose best plan is this one, with these modules at checkpointing level 1."""
    level = Dimension([0, 1], payloads={1: {"units": list(units), "state": []}} if units else {})
    dimensions: Mapping[str, Dimension] = DIMENSIONS | {"checkpointing.level": level}
    plain = {name: dimension.values[0] for name, dimension in dimensions.items()}
    best = replace(plan, settings=plain | dict(plan.settings))
    baseline = Plan.split(plan.samples_per_step, workload.sample_batch_size, plain)
    rows = rows_of(workload.samples)
    record = Record(
        version="0.1.0",
        created="2026-01-02T03:04:05Z",
        environment={"device": "cpu", "gpu": None, "torch": "2.13.0"},
        workload={
            "fingerprint": "2;model=f00d",
            "parameters": sum(p.numel() for p in workload.build_model().parameters()),
            "global_batch": workload.global_batch,
            "loss": "loss_fn",
            "given": ["loss_fn"],
            "clip_grad_norm": workload.clip_grad_norm,
            "sample_shapes": describe(workload.batch(workload.sample_batch_size)),
            "samples": workload.samples.kind.value,
            **({} if rows is None else {"batched": sorted(rows.batched)}),
        },
        vram_budget_bytes=2**26,
        search=SearchSummary(2, 0, 1.0, "no plan is expected to be 1% faster", 0),
        dimensions=dimensions,
        trials=(
            Trial(0, TrialKind.CONFIRMATION, baseline, RAN),
            Trial(1, TrialKind.CONFIRMATION, best, RAN),
        ),
        best_number=1,
        baseline_number=0,
    )
    return Report(record, strategies=load_strategies(), workload=workload)


def losses_by_apply(
    report: Report, model: nn.Module, optimizer: Callable[[nn.Module], Any], batches: Iterable[Any]
) -> list[float]:
    """Return the losses of optimizer steps by `report.apply`, on a copy of the model."""
    other = copy.deepcopy(model)
    with report.apply(other, optimizer(other)) as training:
        losses = [training.step(batch).item() for batch in batches]
    assert len(set(losses)) == len(losses), "it does not train"
    return losses


def by_steps(losses: Sequence[float], plan: Plan) -> list[float]:
    """Return the sum of a plan's micro-batches for each optimizer step."""
    steps = plan.accumulation_steps
    return [sum(losses[at : at + steps]) for at in range(0, len(losses), steps)]


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
