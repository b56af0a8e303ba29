"""A table of GPUs: what it tells of a GPU is what a prediction for that GPU alone tells."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.checks.predict import GpuTable, predict_gpus
from autofit.devices.gpus import Gpu, find_gpu
from autofit.errors import InvalidArgument, PredictionUnavailable
from autofit.plan import Dimension, Plan
from autofit.prediction.predict import predict
from autofit.strategy import Numerics, Phase
from autofit.training.workload import Workload
from autofit.units import GIB, MIB
from benchmarks.workload_models import GPT


def with_memory(name: str, size: int) -> Gpu:
    return replace(find_gpu(name), total_bytes=size)


NAMES = ("T4", "L4", "RTX 5090", "H100")
GPUS = {name: with_memory(name, 8 * GIB + rank) for rank, name in enumerate(NAMES)}
"""With as much memory as keeps dry runs short, in their order."""


def decoder(**options: Any) -> Workload:
    ids = torch.randint(0, 5000, (4, 256))
    return Workload(lambda: GPT(5000, 256, 256, 2, 4), {"ids": ids}, **options)


@pytest.fixture(scope="module")
def table() -> GpuTable:
    return predict_gpus(decoder(global_batch=4096), gpus=list(GPUS.values()))


def test_the_gpus_are_in_the_order_of_their_memory(table: GpuTable) -> None:
    assert [row.gpu for row in table.gpus] == list(GPUS)
    assert [row.total_bytes for row in table.gpus] == [8 * GIB + rank for rank in range(4)]
    assert table.plan == decoder(global_batch=4096).plan()


def test_types_that_a_gpu_lacks_are_no_variants_of_it(table: GpuTable) -> None:
    types = {
        row.gpu: [fit.plan.settings["precision.dtype"] for fit in row.fits] for row in table.gpus
    }
    assert types["T4"] == ["default", "float16"]
    assert types["L4"] == types["H100"] == ["default", "tf32", "bfloat16", "float16"]


def test_the_asked_plan_needs_what_a_prediction_says(table: GpuTable) -> None:
    for row in (table.gpus[0], table.gpus[-1]):
        for fit in row.fits:
            alone = predict(decoder(global_batch=4096), plan=fit.plan, gpu=GPUS[row.gpu])
            assert fit.required_bytes == alone.required_bytes
            assert fit.required_bytes + (fit.margin_bytes or 0) == alone.interval[1]
            assert fit.fits == alone.fits(row.total_bytes)


def test_the_largest_fits_and_the_next_one_does_not(table: GpuTable) -> None:
    workload = decoder(global_batch=4096)
    for row in (table.gpus[0], table.gpus[-1]):
        for fit in (row.fits[0], row.fits[-1]):
            assert fit.largest is not None
            assert fit.largest.global_batch == 4096
            alone = predict(workload, plan=fit.largest, gpu=GPUS[row.gpu])
            assert alone.fits(row.total_bytes)
            assert fit.largest_required_bytes == alone.required_bytes
            steps = fit.largest.accumulation_steps - 1
            larger = Plan.split(4096, -(-4096 // steps), fit.plan.settings)
            assert not predict(workload, plan=larger, gpu=GPUS[row.gpu]).fits(row.total_bytes)


def test_settings_of_the_plan_stay() -> None:
    plan = Plan(4, accumulation_steps=2, settings={"precision.dtype": "bfloat16"})
    found = predict_gpus(
        decoder(),
        gpus=[with_memory("T4", 1340 * MIB), with_memory("L4", 1340 * MIB + 1)],
        plan=plan,
    )
    t4, l4 = found.gpus
    assert t4.fits == ()
    assert "bfloat16" in (t4.detail or "")
    (fit,) = l4.fits
    assert fit.plan == plan
    assert fit.largest is not None
    assert fit.largest.accumulation_steps == 2
    assert "bfloat16" in str(found)


def test_payloads_of_a_report_are_used() -> None:
    setting = "checkpointing.level"
    payloads = {setting: {"units": ["blocks.0", "blocks.1"], "state": []}}
    plan = Plan(64, settings={setting: 3})
    checkpointed = predict_gpus(
        decoder(), gpus=["L4"], plan=plan, payloads=payloads, strategies=["checkpointing"]
    )
    plain = predict_gpus(decoder(), gpus=["L4"], plan=Plan(64), strategies=["checkpointing"])
    (with_levels,), (without,) = checkpointed.gpus[0].fits, plain.gpus[0].fits
    assert (with_levels.required_bytes or 0) < (without.required_bytes or 0)
    assert any("checkpoint levels" in note for note in plain.notes)
    with pytest.raises(PredictionUnavailable, match="plan="):
        predict_gpus(decoder(), gpus=["L4"], plan=plan)


def test_where_one_sample_does_not_fit_there_is_no_largest() -> None:
    found = predict_gpus(decoder(), gpus=[with_memory("L4", 640 * MIB)])
    assert [(fit.fits, fit.largest) for fit in found.gpus[0].fits] == [(False, None)] * 4
    assert "none" in str(found)


class _Costly:
    """A strategy that does nothing, and whose second value is costly to try."""

    name = "costly"
    phase = Phase.STEP
    numerics = Numerics.EXACT

    def dimensions(self, context: Any) -> dict[str, Dimension]:
        return {"costly.mode": Dimension(["off", "on"], trial_cost_s=60.0)}

    def apply(self, training: Any, settings: Any, payloads: Any) -> Any:
        assert settings == {"costly.mode": "off"}
        return nullcontext()

    def describe(self, settings: Any, payloads: Any) -> list[str]:
        return []


def test_what_is_costly_is_left_out_and_named() -> None:
    found = predict_gpus(decoder(), gpus=["L4"], strategies=[_Costly()])
    assert len(found.gpus[0].fits) == 1
    assert any("costly.mode was left at off" in note for note in found.notes)


def test_code_that_looks_at_values_cannot_be_told() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).mean()
        return loss if loss.item() > 0 else -loss

    workload = Workload(nn.Linear(4, 4), torch.randn(8, 4), loss_fn=loss_fn)
    with pytest.raises(PredictionUnavailable, match="item"):
        predict_gpus(workload, gpus=["L4", "T4"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpus": ["Voodoo 2"]}, "Voodoo 2"),
        ({"gpus": []}, "gpu is empty"),
        ({"strategies": ["nothing"]}, "nothing"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        predict_gpus(decoder(), **{"gpus": ["L4"], **options})


def test_the_json_tells_what_the_table_tells(table: GpuTable) -> None:
    read = json.loads(json.dumps(table.to_dict()))
    assert [row["gpu"] for row in read["gpus"]] == list(GPUS)
    for told, row in zip(read["gpus"], table.gpus, strict=True):
        assert [each["required_bytes"] for each in told["fits"]] == [
            fit.required_bytes for fit in row.fits
        ]
    assert str(table).count("\nL4 ") == len(table.gpus[1].fits)
