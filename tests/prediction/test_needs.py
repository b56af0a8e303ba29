"""Traces that serve several GPUs and micro-batches are those that a dry run would have made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses
from torch import nn

from autofit.devices.gpus import find_gpu
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.dry_run import dry_run
from autofit.prediction.needs import SharedRuns, need_of, on_line
from autofit.registry import load_strategies
from autofit.training.workload import Workload
from benchmarks.workload_models import GPT, resnet

PRECISION = tuple(load_strategies(["precision"]))


def decoder() -> Workload:
    ids = torch.randint(0, 500, (2, 64))
    return Workload(lambda: GPT(500, 64, 128, 2, 2), {"ids": ids})


def convolutions() -> Workload:
    batch = torch.randn(2, 3, 32, 32), torch.randint(0, 10, (2,))
    return Workload(lambda: resnet((16, 32), 1, 10), batch, criterion=nn.CrossEntropyLoss())


def plan(micro_batch: int, dtype: str = "default", steps: int = 2) -> ResolvedPlan:
    settings = {"precision.dtype": dtype}
    given = Plan(micro_batch, accumulation_steps=steps, settings=settings)
    return ResolvedPlan(given, {}, PRECISION)


@pytest.mark.parametrize("make", [decoder, convolutions])
def test_between_two_micro_batches_sizes_lie_on_lines(make: Any) -> None:
    workload, gpu = make(), find_gpu("L4")
    runs = {size: dry_run(workload, plan(size), gpu) for size in (4, 7, 32)}
    assert on_line(runs[4], runs[32], 7) == runs[7]
    assert on_line(runs[32], runs[4], 7) == runs[7]


def test_a_loss_over_pairs_of_samples_is_on_no_line() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        features = model(batch)
        return F.cross_entropy(features @ features.t(), torch.arange(len(batch), device="cuda"))

    workload = Workload(nn.Linear(16, 8), torch.randn(4, 16), loss_fn=loss_fn)
    gpu = find_gpu("L4")
    runs = {size: dry_run(workload, ResolvedPlan(Plan(size)), gpu) for size in (64, 256, 512)}
    assert on_line(runs[64], runs[512], 256) is None
    shared = SharedRuns(workload)
    for size in (64, 512, 256, 300):
        found = shared.need(ResolvedPlan(Plan(size)), gpu)
        run = dry_run(workload, ResolvedPlan(Plan(size)), gpu)
        assert found == need_of(run.recording_on(gpu), gpu)
    assert len(shared.made) == 4


@pytest.mark.slow
def test_three_dry_runs_tell_all_micro_batches_between_but_uneven_ones() -> None:
    workload, gpu = decoder(), find_gpu("L4")
    shared = SharedRuns(workload)
    for size in (4, 40, 12):
        shared.need(plan(size, "bfloat16"), gpu)
    for size in (5, 39):
        run = dry_run(workload, plan(size, "bfloat16"), gpu)
        assert shared.need(plan(size, "bfloat16"), gpu) == need_of(run.recording_on(gpu), gpu)
        trace = shared.run(plan(size, "bfloat16"), gpu)
        assert trace.micro_batch_cost_on(gpu) == run.micro_batch_cost_on(gpu)
    assert len(shared.made) == 3
    uneven = ResolvedPlan(Plan.split(22, 8, {"precision.dtype": "bfloat16"}), {}, PRECISION)
    assert uneven.plan.micro_batch_sizes == (8, 7, 7)
    assert shared.run(uneven, gpu) == dry_run(workload, uneven, gpu)
    assert len(shared.made) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "names", "dry_runs"),
    [("default", ["T4", "B200"], 1), ("float16", ["V100", "A100", "L4", "B200"], 3)],
)
def test_a_gpu_that_answers_alike_needs_no_dry_run_of_its_own(
    dtype: str, names: list[str], dry_runs: int
) -> None:
    workload = decoder()
    shared = SharedRuns(workload)
    for name in names:
        gpu = find_gpu(name)
        run = dry_run(workload, plan(8, dtype), gpu)
        assert shared.need(plan(8, dtype), gpu) == need_of(run.recording_on(gpu), gpu)
        assert shared.run(plan(8, dtype), gpu).recording_on(gpu) == run.recording_on(gpu)
    assert len(shared.made) == dry_runs


def test_code_that_asks_for_the_card_has_a_dry_run_for_each() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        major, _ = torch.cuda.get_device_capability()
        return model(batch.repeat(major, 1)).square().mean()

    workload = Workload(nn.Linear(256, 256), torch.randn(64, 256), loss_fn=loss_fn)
    shared = SharedRuns(workload)
    seven, nine = (
        shared.need(ResolvedPlan(Plan(4096)), find_gpu(name)).required_bytes
        for name in ("T4", "H100")
    )
    assert len(shared.made) == 2
    assert nine > seven


@pytest.mark.slow
def test_each_variant_is_checked_by_a_third_dry_run_before_two_tell_what_lies_between() -> None:
    workload, gpu = decoder(), find_gpu("L4")
    shared = SharedRuns(workload)
    for size, dtype in (
        (4, "default"),
        (40, "default"),
        (12, "default"),
        (4, "tf32"),
        (40, "tf32"),
    ):
        shared.need(plan(size, dtype), gpu)
    run = dry_run(workload, plan(23, "tf32"), gpu)
    assert shared.need(plan(23, "tf32"), gpu) == need_of(run.recording_on(gpu), gpu)
    assert len(shared.made) == 6
    shared.need(plan(17, "tf32"), gpu)
    assert len(shared.made) == 6


def test_what_departs_from_a_line_is_run() -> None:
    """Up to 16 samples a table of ten is made, above one of twenty rows, and both are fixed."""

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        rows = 10 if len(batch) <= 16 else 20
        table = torch.zeros(rows * 2**20, device=batch.device)
        return model(batch).square().mean() + table.sum()

    workload = Workload(nn.Linear(256, 256), torch.randn(4, 256), loss_fn=loss_fn)
    shared, gpu = SharedRuns(workload), find_gpu("L4")
    for size in (4, 32, 16, 12, 20, 15):
        run = dry_run(workload, ResolvedPlan(Plan(size)), gpu)
        assert shared.need(ResolvedPlan(Plan(size)), gpu) == need_of(run.recording_on(gpu), gpu)
    assert len(shared.made) == 6
