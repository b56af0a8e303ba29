"""Exports of a report, loaded by the real libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit import Plan, Report, Workload
from tests.integrations.conftest import report_of

DEEPSPEED_FIELDS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization",
    "torch_autocast",
}
"""Fields of its documentation (DeepSpeed Configuration JSON) that exports use."""


def report_in(dtype: str) -> Report:
    batch = (torch.randn(4, 6), torch.arange(4) % 3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    workload = Workload(
        model, batch, criterion=nn.CrossEntropyLoss(), global_batch=12, clip_grad_norm=0.5
    )
    settings: dict[str, Any] = {"checkpointing.level": 1, "precision.dtype": dtype}
    return report_of(workload, Plan(4, accumulation_steps=3, settings=settings), ("0",))


@pytest.mark.parametrize(("dtype", "named"), [("bfloat16", "bf16"), ("default", "no")])
def test_accelerate_config(dtype: str, named: str, tmp_path: Path) -> None:
    config: Any = pytest.importorskip(
        "accelerate.commands.config.config_args",
        reason="accelerate is not installed: pip install -e . --group dev",
    )
    text = report_in(dtype).export("accelerate", tmp_path / "plan.yaml")
    loaded = config.load_config_from_file(str(tmp_path / "plan.yaml"))
    assert (loaded.mixed_precision, loaded.num_processes, loaded.use_cpu) == (named, 1, True)
    assert loaded.distributed_type.value == "NO"
    assert "Accelerator(gradient_accumulation_steps=3)" in text
    assert "batch_size=4" in text


def test_deepspeed_config(tmp_path: Path) -> None:
    config = json.loads(report_in("bfloat16").export("deepspeed", tmp_path / "plan.json"))
    assert set(config) - {"_comment"} <= DEEPSPEED_FIELDS
    assert config["train_batch_size"] == 12 == 4 * 3
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "checkpointing.level=1 has no place here. In code:" in config["_comment"]
