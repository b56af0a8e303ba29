"""Exports of a report, loaded by the real libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.plan import Plan
from autofit.report.report import Report
from autofit.training.workload import Workload

WANTED = "not installed: pip install -e .[dev]"
DEEPSPEED_FIELDS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization",
    "torch_autocast",
}
"""Fields of its documentation (DeepSpeed Configuration JSON) that exports use."""


@pytest.fixture
def report(make_report: Callable[..., Report]) -> Report:
    return report_with(make_report, Plan(4, accumulation_steps=3))


def report_with(make_report: Callable[..., Report], plan: Plan, **settings: Any) -> Report:
    batch = (torch.randn(4, 6), torch.arange(4) % 3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    workload = Workload(
        model, batch, criterion=nn.CrossEntropyLoss(), global_batch=12, clip_grad_norm=0.5
    )
    chosen = {"checkpointing.level": 1, "precision.dtype": "bfloat16", **settings}
    wanted = Plan(
        plan.micro_batch,
        accumulation_steps=plan.accumulation_steps,
        global_batch=plan.global_batch,
        settings=chosen,
    )
    return make_report(workload, wanted, ("0",))


@pytest.mark.parametrize(("dtype", "named"), [("bfloat16", "bf16"), ("default", "no")])
def test_accelerate_config(
    dtype: str, named: str, make_report: Callable[..., Report], tmp_path: Path
) -> None:
    config: Any = pytest.importorskip(
        "accelerate.commands.config.config_args", reason=f"accelerate is {WANTED}"
    )
    plan = Plan(4, accumulation_steps=3)
    report = report_with(make_report, plan, **{"precision.dtype": dtype})
    text = report.export("accelerate", tmp_path / "plan.yaml")
    loaded = config.load_config_from_file(str(tmp_path / "plan.yaml"))
    assert (loaded.mixed_precision, loaded.num_processes, loaded.use_cpu) == (named, 1, True)
    assert loaded.distributed_type.value == "NO"
    assert "Accelerator(gradient_accumulation_steps=3)" in text
    assert "batch_size=4" in text


def test_deepspeed_config(report: Report, tmp_path: Path) -> None:
    text = report.export("deepspeed", tmp_path / "plan.json")
    config = json.loads(text)
    assert set(config) - {"_comment"} <= DEEPSPEED_FIELDS
    assert config["train_batch_size"] == 12 == 4 * 3
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "checkpointing.level=1 has no place here. In code:" in config["_comment"]
