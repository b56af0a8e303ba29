"""convolution.benchmark: cuDNN's own choice by time, where a model convolves on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autofit
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import collect_dimensions, load_strategies
from autofit.strategy import Capabilities
from autofit.testing import PlainContext, check_strategy
from autofit.testing.conformance import attention, convolutions
from autofit.training.training import Training
from autofit.training.workload import Workload

HOPPER = Capabilities("cuda", bfloat16=True, float16=True, tf32=True, compute_capability=(9, 0))
CPU = Capabilities("cpu", bfloat16=True)
SETTING = "convolution.benchmark"
STRATEGIES = load_strategies(["convolution"])


def transposed() -> Workload:
    torch.manual_seed(0)
    return Workload(nn.ConvTranspose1d(2, 2, 3), torch.randn(2, 2, 8))


def offered(build: Callable[[], Workload], capabilities: Capabilities, device: str = "cpu") -> Any:
    return collect_dimensions(STRATEGIES, PlainContext(build, device, capabilities)).get(SETTING)


@pytest.mark.parametrize("build", [convolutions, transposed])
def test_it_is_offered_to_what_convolves_on_an_nvidia_gpu(build: Any) -> None:
    dimension = offered(build, HOPPER)
    assert list(dimension.values) == [False, True]
    assert dimension.is_costly  # a probe waits for cuDNN's trials
    assert dimension.fresh_worker  # cuDNN remembers: the first step's peak would not show
    assert offered(build, CPU) is None


def test_it_is_not_offered_to_what_does_not_convolve() -> None:
    assert offered(attention, HOPPER) is None


@pytest.mark.parametrize("flag", ["benchmark", "deterministic"])
def test_it_is_not_offered_where_the_user_has_chosen(flag: str) -> None:
    with torch.backends.cudnn.flags(**{flag: True}):
        assert offered(convolutions, HOPPER) is None


def test_a_dry_run_does_not_choose_it() -> None:
    context = PlainContext(convolutions, "meta", HOPPER)
    assert list(collect_dimensions(STRATEGIES, context)[SETTING].values) == [False]
    (note,) = context.notes
    assert "not predicted" in note


@pytest.mark.slow
def test_conformance() -> None:
    assert check_strategy("convolution", workloads=[convolutions], capabilities=HOPPER) == 2


@pytest.mark.cuda
def test_conformance_on_a_gpu() -> None:
    made = [convolutions]
    assert check_strategy("convolution", workloads=made, device="cuda", capabilities=HOPPER) == 2


def test_it_is_in_force_in_the_training_and_restored_after_a_failure() -> None:
    seen = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(torch.backends.cudnn.benchmark)
        loss: Tensor = model(batch).mean()
        return loss

    model = nn.Conv2d(1, 1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    recipe = Workload(model, torch.randn(2, 1, 2, 2), loss_fn=loss_fn).recipe
    plan = ResolvedPlan(Plan(2, settings={SETTING: True}), {}, STRATEGIES)
    before = torch.backends.cudnn.benchmark
    training = Training(model, optimizer, recipe, plan, device=torch.device("cpu"))
    with pytest.raises(RuntimeError), training:
        training.step(torch.randn(2, 3, 2, 2))
    assert seen == [True]
    assert torch.backends.cudnn.benchmark is before is False


@pytest.mark.cuda
def test_it_is_probed_and_nothing_is_predicted_of_it() -> None:
    plan = Plan(4, settings={SETTING: True})
    trial = autofit.probe(convolutions(), plan=plan, device="cuda", steps=3)
    assert trial.ok, trial.measurement.detail
    assert trial.plan.settings[SETTING] is True
    with pytest.raises(autofit.PredictionUnavailable, match="can only be measured"):
        autofit.predict(convolutions(), plan=plan, gpu="H100")
