"""A table of GPUs: what it tells of a GPU is what a prediction for that GPU alone tells."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.devices.gpu_catalogue import Gpu, find_gpu
from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.training.workload import Workload
from autofit.units import GIB, MIB
from benchmarks.workload_models import GPT


def with_memory(name: str, size: int) -> Gpu:
    return replace(find_gpu(name), total_bytes=size)


def decoder(**options: Any) -> Workload:
    ids = torch.randint(0, 5000, (4, 256))
    return Workload(lambda: GPT(5000, 256, 256, 2, 4), {"ids": ids}, **options)


@pytest.mark.slow
def test_a_row_says_what_a_prediction_for_that_gpu_alone_says() -> None:
    workload, said = decoder(global_batch=256), list[str]()
    gpus = [with_memory("L4", 2 * GIB + 1), with_memory("T4", 2 * GIB)]
    table = autofit.predict(workload, gpu=gpus, progress=said.append)
    assert list(table.predictions) == ["T4", "L4"], "by memory"
    assert said == ["T4 (1 of 2)", "L4 (2 of 2)"]
    for gpu in gpus:
        alone, row = autofit.predict(workload, gpu=gpu), table.predictions[gpu.name]
        assert row.required_bytes == alone.required_bytes
        assert row.largest_micro_batch == alone.largest_micro_batch
        assert f"{alone.largest_micro_batch}" in str(table)
    read = json.loads(json.dumps(table.to_dict()))
    assert [row["fits"] for row in read["gpus"]] == [True, True]
    assert table.fits


@dataclass
class Noted:
    """A loss that leaves a mark in a file each time it runs, in whichever process."""

    file: Path

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with self.file.open("a") as file:
            file.write(".")
        return model(batch).square().mean()


def test_gpus_that_answer_alike_take_the_dry_runs_of_one(tmp_path: Path) -> None:
    def marks(*names: str) -> int:
        file = tmp_path / "-".join(names)
        workload = Workload(nn.Linear(64, 64), torch.randn(8, 64), loss_fn=Noted(file))
        autofit.predict(workload, gpu=[with_memory(name, GIB) for name in names])
        return file.stat().st_size

    assert marks("L4", "RTX 4090") == marks("L4")


@pytest.mark.slow
def test_a_gpu_that_lacks_a_setting_of_the_plan_is_named() -> None:
    plan = Plan(4, accumulation_steps=2, settings={"precision.dtype": "bfloat16"})
    table = autofit.predict(decoder(), gpu=["T4", "L4"], plan=plan)
    assert list(table.predictions) == ["L4"]
    assert "bfloat16" in table.lacking["T4"]
    assert "T4: " in str(table)
    with pytest.raises(InvalidArgument, match="bfloat16"):
        autofit.predict(decoder(), gpu=["T4"], plan=plan)


def test_where_one_sample_does_not_fit_there_is_no_largest() -> None:
    table = autofit.predict(decoder(), gpu=[with_memory("L4", 640 * MIB)])
    assert not table.fits
    assert "none" in str(table)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpu": ["Voodoo 2"]}, "Voodoo 2"),
        ({"gpu": []}, "gpu is empty"),
        ({"strategies": ["nothing"]}, "nothing"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        autofit.predict(decoder(), **{"gpu": ["L4"], **options})
