"""What a user's test suite may ask of `autofit_check`; tests of the plugin run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from autofit import Plan, Verdict, Workload

Check = Callable[..., Verdict]


def make_workload() -> Workload:
    batch = torch.randn(8, 512), torch.randn(8, 512)
    return Workload(make_model, batch, criterion=nn.functional.mse_loss)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512))


def test_small(autofit_check: Check) -> None:
    verdict = autofit_check(make_workload(), vram_budget="2GiB", micro_batch=8, gpu="L4")
    assert verdict.method == "predict"


def test_large(autofit_check: Check) -> None:
    autofit_check(make_workload(), vram_budget="2GiB", micro_batch=99999, gpu="L4")


def test_reduced(autofit_check: Check) -> None:
    settings = {"precision.dtype": "bfloat16"}
    verdict = autofit_check(make_workload(), vram_budget="2GiB", settings=settings, gpu="L4")
    assert verdict.plan.settings == settings
    assert verdict.method == "predict"


def test_split(autofit_check: Check) -> None:
    workload = replace(make_workload(), global_batch=20)
    verdict = autofit_check(workload, vram_budget="2GiB", micro_batch=10, gpu="L4")
    assert verdict.plan == Plan.split(20, 10)
    verdict = autofit_check(workload, vram_budget="2GiB", gpu="L4")
    assert verdict.plan == Plan.split(20, 8)


def test_contradiction_of_counts(autofit_check: Check) -> None:
    autofit_check(make_workload(), vram_budget="2GiB", plan=Plan(1), micro_batch=64, gpu="L4")


def test_contradiction_of_settings(autofit_check: Check) -> None:
    settings = {"precision.dtype": "bfloat16"}
    autofit_check(make_workload(), vram_budget="2GiB", plan=Plan(1), settings=settings, gpu="L4")


def test_function(autofit_check: Check) -> None:
    autofit_check(make_workload, vram_budget="2GiB", gpu="L4")


def test_other() -> None:
    raise AssertionError("this checks no capacity")
