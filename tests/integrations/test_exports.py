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


def test_training_arguments(report: Report, make_report: Callable[..., Report]) -> None:
    pytest.importorskip("transformers", reason=f"transformers is {WANTED}")
    text = report.export("transformers")
    names: dict[str, Any] = {}
    exec(text.replace("output_dir='out'", "output_dir='out', use_cpu=True"), names)
    args = names["args"]
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 3)
    assert (args.bf16, args.fp16, args.max_grad_norm) == (True, False, 0.5)
    assert "# checkpointing.level=1 has no place here" in text
    assert "#     with checkpointed(model, units, state):" in text

    fused = report_with(
        make_report, Plan(12), **{"optimizer.implementation": "fused", "precision.dtype": "default"}
    ).export("transformers")
    assert "optim='adamw_torch_fused'" in fused
    assert "optimizer.implementation" not in fused.replace(fused.splitlines()[0], "")


def test_lightning_arguments(report: Report) -> None:
    pytest.importorskip("lightning", reason=f"lightning is {WANTED}")
    names: dict[str, Any] = {}
    text = report.export("lightning")
    exec(text, names)
    trainer = names["trainer"]
    assert (trainer.precision, trainer.accumulate_grad_batches) == ("bf16-mixed", 3)
    assert trainer.gradient_clip_val == 0.5
    assert "batch_size=4" in text
    assert "# checkpointing.level=1 has no place here" in text


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
