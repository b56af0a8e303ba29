"""What other sizes and variants require: lines through dry runs."""

from __future__ import annotations

from functools import partial
from itertools import count, groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.base import Environment
from autofit.devices.gpu_catalogue import find_gpu, gpu_of
from autofit.errors import PredictionUnavailable
from autofit.plan import CostHint, Dimension, Plan, ResolvedPlan, variant_key
from autofit.prediction.dry_run import dry_run
from autofit.prediction.needs import SharedRuns, need_of, on_line
from autofit.prediction.predict import predict, predict_resolved
from autofit.prediction.prior_lines import prior_lines
from autofit.registry import load_strategies
from autofit.searching.predicted_lines import most_seconds
from autofit.space import Space
from autofit.training.workload import Workload
from autofit.units import GIB
from benchmarks.workload_models import GPT, resnet

PRECISION = tuple(load_strategies(["precision"]))


def decoder() -> Workload:
    ids = torch.randint(0, 500, (2, 64))
    return Workload(lambda: GPT(500, 64, 128, 1, 2), {"ids": ids})


def convolutions() -> Workload:
    batch = torch.randn(2, 3, 32, 32), torch.randint(0, 10, (2,))
    return Workload(lambda: resnet((16, 32), 1, 10), batch, criterion=nn.CrossEntropyLoss())


def plan(micro_batch: int, dtype: str = "default", steps: int = 2) -> ResolvedPlan:
    settings = {"precision.dtype": dtype}
    given = Plan(micro_batch, accumulation_steps=steps, settings=settings)
    return ResolvedPlan(given, {}, PRECISION)


@pytest.mark.slow
@pytest.mark.parametrize("make", [decoder, convolutions])
def test_between_two_micro_batches_sizes_lie_on_lines(make: Any) -> None:
    workload, gpu = make(), find_gpu("L4")
    runs = {size: dry_run(workload, plan(size), gpu) for size in (4, 7, 32)}
    assert on_line(runs[4], runs[32], 7) == runs[7]
    assert on_line(runs[32], runs[4], 7) == runs[7]


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
    assert len(shared.dry_runs) == dry_runs


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
    assert len(shared.dry_runs) == 2
    assert nine > seven


def test_what_departs_from_a_line_is_run() -> None:
    """Up to 16 samples a table of ten is made, above one of twenty rows, and both are fixed."""

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        rows = 10 if len(batch) <= 16 else 20
        table = torch.zeros(rows * 2**20, device=batch.device)
        return model(batch).square().mean() + table.sum()

    workload = Workload(nn.Linear(256, 256), torch.randn(4, 256), loss_fn=loss_fn)
    shared, gpu = SharedRuns(workload), find_gpu("L4")
    for size in (4, 32, 16, 20):
        run = dry_run(workload, ResolvedPlan(Plan(size)), gpu)
        assert shared.need(ResolvedPlan(Plan(size)), gpu) == need_of(run.recording_on(gpu), gpu)
    assert len(shared.dry_runs) == 4


# -- Memory and time lines before the first probe

A100, H200 = find_gpu("A100"), find_gpu("H200")
SPACE = Space({"precision.dtype": Dimension(["default", "bfloat16"])}, 8)


def workload(**options: Any) -> Workload:
    return Workload(
        lambda: nn.Sequential(nn.Linear(64, 65536), nn.GELU(), nn.Linear(65536, 64)),
        torch.randn(8, 64),
        **options,
    )


@pytest.mark.slow
def test_lines_tell_what_a_larger_micro_batch_requires_and_costs() -> None:
    chosen = load_strategies(["precision"])
    lines, times, notes = prior_lines(workload(), SPACE, H200, 8 * GIB, strategies=chosen)
    keys = [variant_key(settings) for settings in SPACE.variants()]
    assert {*lines} == {*times} == {*keys}
    assert notes == ()
    for key, settings in zip(keys, SPACE.variants(), strict=True):
        found: Any = predict(workload(), plan=Plan(5000, settings=settings), gpu=H200)
        bytes_and_seconds = found.required_bytes, found.micro_batch_cost.seconds
        for (fixed, per_sample), at in zip(
            (lines[key], times[key]), bytes_and_seconds, strict=True
        ):
            assert fixed + 5000 * per_sample == pytest.approx(at, rel=0.05)
    plain, bfloat16 = (times[key][1] for key in keys)
    assert bfloat16 < plain


def test_a_gpu_of_unknown_rates_has_memory_lines_alone() -> None:
    lines, times, notes = prior_lines(workload(), Space({}, 8), find_gpu("24GiB"), 8 * GIB)
    assert (len(lines), times, notes) == (1, {}, ())


def test_what_cannot_be_predicted_has_a_note_instead() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch).mean()
        return loss * loss.item()

    lines, _, notes = prior_lines(workload(loss_fn=loss_fn), Space({}, 8), A100, 8 * GIB)
    assert lines == {}
    assert "loss * loss.item()" in notes[0]


@pytest.mark.parametrize("runs", [-1, *range(5, 10)])
def test_values_without_an_order_have_lines_together_or_not_at_all(
    runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=partial(next, count()))
    monkeypatch.setattr("autofit.prediction.prior_lines.time", clock)
    space = Space({"precision.dtype": Dimension(["default", "tf32", "bfloat16"])}, 8)
    chosen = load_strategies(["precision"])
    lines, _, notes = prior_lines(
        workload(), space, A100, 8 * GIB, strategies=chosen, timeout_s=2.0 * runs
    )
    assert len(lines) == ((0 if runs < 0 else 1) if notes else 3)


def test_where_one_value_cannot_be_predicted_the_others_have_no_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def but_tf32(workload: Workload, resolved: ResolvedPlan, *given: Any, **options: Any) -> Any:
        if resolved.plan.settings["precision.dtype"] == "tf32":
            raise PredictionUnavailable("not in this test")
        return predict_resolved(workload, resolved, *given, **options)

    monkeypatch.setattr("autofit.prediction.prior_lines.predict_resolved", but_tf32)
    dimensions = {"precision.dtype": Dimension(["default", "tf32", "bfloat16"])}
    chosen = load_strategies(["precision"])
    lines, times, (note,) = prior_lines(
        workload(), Space(dimensions, 8), A100, 8 * GIB, strategies=chosen
    )
    assert len(lines) == len(times) == 1
    assert "not in this test" in note


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that lines are predicted from, in order."""
    plans: list[Plan] = []

    def noted(workload: Workload, resolved: ResolvedPlan, *args: Any, **options: Any) -> Any:
        plans.append(resolved.plan)
        return predict_resolved(workload, resolved, *args, **options)

    monkeypatch.setattr("autofit.prediction.prior_lines.predict_resolved", noted)
    return plans


def test_a_budget_that_the_second_size_exceeds_lies_between_the_first_two(
    predicted: list[Plan],
) -> None:
    prior_lines(workload(), Space({}, 8), A100, GIB // 2)
    assert sorted(plan.micro_batch for plan in predicted) == [8, 64]


@pytest.mark.parametrize(("left", "most"), [(None, 20.0), (600.0, 20.0), (60.0, 10.0), (0.0, 0.0)])
def test_predicting_leaves_most_of_the_time_to_probes(left: float | None, most: float) -> None:
    assert most_seconds(left) == pytest.approx(most)


@pytest.mark.slow
def test_what_tells_most_is_predicted_first(predicted: list[Plan]) -> None:
    """Plain, then values without a hint, those without an order first and those between last."""
    dimensions = {
        "placement.level": Dimension(range(5)),
        "hinted.level": Dimension((0, 1), hints={1: CostHint(0.5)}),
        "precision.dtype": Dimension(["default", "tf32", "bfloat16"]),
        "compiled.mode": Dimension(("no", "yes"), trial_cost_s=60.0),
        "beside.plain": Dimension((0, 1), when={"placement.level": [1]}),
    }
    lines, _, _ = prior_lines(workload(), Space(dimensions, 8), A100, 8 * GIB)
    level, dtype = "placement.level", "precision.dtype"
    order = [{}, {dtype: "bfloat16"}, {dtype: "tf32"}, {level: 4}, {level: 2}]
    order += [{level: 1}, {level: 3}, {"hinted.level": 1}]
    changes = [
        {
            name: value
            for name, value in plan.settings.items()
            if value != dimensions[name].values[0]
        }
        for plan in predicted
    ]
    assert [settings for settings, _ in groupby(changes)] == order
    assert len(lines) == len(order)


def environment(gpu: str | None, capability: str | None) -> Environment:
    return Environment("cuda", gpu, capability, 80 * GIB, None, None, "2.11", "3.11")


def test_the_gpu_of_an_environment() -> None:
    known: Any = gpu_of(environment("NVIDIA H100 80GB HBM3", "9.0"))
    assert (known.total_bytes, known.capability) == (80 * GIB, (9, 0))
    assert known.rates == find_gpu("H100").rates
    unknown: Any = gpu_of(environment("NVIDIA Unheard-of 9000", "9.0"))
    assert unknown.rates is None
    assert gpu_of(environment(None, None)) is None
