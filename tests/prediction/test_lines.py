"""Memory lines before the first probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.base import Environment
from autofit.plan import Dimension, Plan, variant_key
from autofit.prediction.engine import predict
from autofit.prediction.gpus import find_gpu
from autofit.prediction.lines import gpu_of, memory_lines
from autofit.registry import load_strategies
from autofit.space import Space
from autofit.units import GIB
from autofit.workload import Workload

A100 = find_gpu("A100")
SPACE = Space({"precision.dtype": Dimension(["as_is", "bfloat16"])}, 8)


def workload(**options: Any) -> Workload:
    return Workload(
        lambda: nn.Sequential(nn.Linear(64, 65536), nn.GELU(), nn.Linear(65536, 64)),
        torch.randn(8, 64),
        **options,
    )


def test_a_line_tells_what_a_larger_micro_batch_requires() -> None:
    found = memory_lines(
        workload(), SPACE, A100, 8 * GIB, strategies=load_strategies(["precision"])
    )
    assert len(found.lines) == 2
    assert found.notes == ()
    for settings in SPACE.variants():
        fixed, per_sample = found.lines[variant_key(settings)]
        required = predict(workload(), plan=Plan(5000, settings=settings), gpu=A100).required_bytes
        assert fixed + 5000 * per_sample == pytest.approx(required, rel=0.05)


def test_what_cannot_be_rehearsed_has_a_note_instead() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch).mean()
        return loss * loss.item()

    found = memory_lines(workload(loss_fn=loss_fn), Space({}, 8), A100, 8 * GIB)
    assert found.lines == {}
    assert "loss * loss.item()" in found.notes[0]


def test_the_time_it_may_take_is_limited() -> None:
    found = memory_lines(workload(), SPACE, A100, 8 * GIB, timeout_s=-1.0)
    assert found.lines == {}
    assert len(found.notes) == 1


def environment(gpu: str | None, capability: str | None) -> Environment:
    return Environment("cuda", gpu, capability, 80 * GIB, None, None, "2.11", "3.11")


def test_the_gpu_of_an_environment() -> None:
    known = gpu_of(environment("NVIDIA H100 80GB HBM3", "9.0"))
    assert known is not None
    assert (known.total_bytes, known.capability) == (80 * GIB, (9, 0))
    assert gpu_of(environment(None, None)) is None
