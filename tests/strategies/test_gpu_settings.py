"""What an NVIDIA GPU offers: attention's kernels, cuDNN's choice by time, segments that grow."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autofit
from autofit import Plan, Workload
from autofit.memory.allocator import VARIABLES, configured, configured_by
from autofit.registry import load_strategies
from autofit.strategy import Capabilities
from autofit.testing import check_strategy
from autofit.testing.conformance import attention, convolutions
from autofit.training.loss import Recipe
from autofit.units import MIB
from tests.strategies.trainings import HOPPER, offered, training

KERNELS, BENCHMARK, SEGMENTS = (
    load_strategies([name])[0] for name in ("attention", "convolution", "cuda_allocator")
)
KERNEL, CHOICE = "attention.backend", "convolution.benchmark"
GROWING = "cuda_allocator.expandable_segments"
CPU = Capabilities("cpu", bfloat16=True)
backends: Any = import_module("autofit.strategies.attention")  # lies elsewhere in the tree


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


class Attends(nn.Module):
    """(n, 16, 64) -> (n, 16, 64), with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, batch: Tensor) -> Tensor:
        query, key, value = self.inward(batch).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outward(mixed.transpose(1, 2).flatten(2))


def attends(dtype: torch.dtype = torch.float32) -> Workload:
    torch.manual_seed(0)
    batch = torch.randn(4, 16, 64, dtype=dtype), torch.randn(4, 16, 64, dtype=dtype)
    return Workload(Attends().to(dtype), batch, criterion=functional.mse_loss)


def in_half() -> Workload:
    return attends(torch.bfloat16)


def transposed() -> Workload:
    return Workload(nn.ConvTranspose1d(2, 2, 3), torch.randn(2, 2, 8))


def net() -> Workload:
    torch.manual_seed(0)
    return Workload(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), torch.randn(8, 64))


# Where they are offered.


@pytest.mark.parametrize(
    ("strategy", "setting", "build", "device"),
    [
        (BENCHMARK, CHOICE, convolutions, "cpu"),
        (BENCHMARK, CHOICE, transposed, "cpu"),
        pytest.param(SEGMENTS, GROWING, net, "cuda", marks=pytest.mark.cuda),
    ],
)
def test_a_switch_is_offered_on_an_nvidia_gpu_at_the_cost_of_a_worker(
    strategy: Any, setting: str, build: Callable[[], Workload], device: str
) -> None:
    """CuDNN remembers its choice, and segments stay as they are."""
    dimension, _ = offered(strategy, setting, build, device, HOPPER)
    assert dimension.values == (False, True)
    assert dimension.is_costly
    assert dimension.fresh_worker


@pytest.mark.parametrize(
    ("strategy", "setting", "build", "capabilities"),
    [
        (KERNELS, KERNEL, attends, CPU),
        (BENCHMARK, CHOICE, convolutions, CPU),
        (BENCHMARK, CHOICE, attention, HOPPER),  # which does not convolve
        (SEGMENTS, GROWING, attention, CPU),
        (KERNELS, KERNEL, net, HOPPER),
    ],
)
def test_none_is_offered_elsewhere_and_to_models_without_use_for_it(
    strategy: Any, setting: str, build: Callable[[], Workload], capabilities: Capabilities
) -> None:
    assert offered(strategy, setting, build, capabilities=capabilities) == (None, [])


@pytest.mark.parametrize(
    ("strategy", "setting", "build"),
    [(BENCHMARK, CHOICE, convolutions), (SEGMENTS, GROWING, attention)],
)
def test_a_dry_run_does_not_choose_a_switch(strategy: Any, setting: str, build: Any) -> None:
    dimension, (note,) = offered(strategy, setting, build, "meta", HOPPER)
    assert dimension.values == (False,)
    assert "not predicted" in note
    plan = Plan(4, settings={setting: True})
    with pytest.raises(autofit.PredictionUnavailable, match="can only be measured"):
        autofit.predict(build(), plan=plan, gpu="H100", strategies=[strategy])


@pytest.mark.parametrize("flag", ["benchmark", "deterministic"])
def test_cudnns_choice_is_not_offered_where_the_user_has_chosen(flag: str) -> None:
    with torch.backends.cudnn.flags(**{flag: True}):
        assert offered(BENCHMARK, CHOICE, convolutions, capabilities=HOPPER)[0] is None


@pytest.mark.parametrize("name", configured_by())
@pytest.mark.parametrize("value", [True, False])
def test_who_sets_the_variable_has_chosen_segments(
    name: str, value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, f"max_split_size_mb:512,expandable_segments:{value}")
    assert offered(SEGMENTS, GROWING, attention, "meta", HOPPER)[0] is None


@pytest.mark.cuda
def test_the_kernel_that_runs_by_default_is_not_offered_again() -> None:
    dimension, (note, _) = offered(KERNELS, KERNEL, in_half, "cuda", HOPPER)
    (default,) = [name for name in ("flash", "efficient", "cudnn") if f"runs {name}" in note]
    assert dimension.values[0] == "default"
    assert default not in dimension.values
    assert len(dimension.values) > 2


@pytest.mark.cuda
def test_where_only_autocast_leaves_a_choice_it_goes_with_half_precision() -> None:
    dimension, _ = offered(KERNELS, KERNEL, attends, "cuda", HOPPER)
    assert "bfloat16" in dimension.when["precision.dtype"]


# While they are in force, and afterwards.


def test_the_line_to_paste_keeps_other_options_of_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(configured_by()[-1], "max_split_size_mb:256")
    exec("\n".join(SEGMENTS.describe({GROWING: True}, {})), {})
    assert configured()[1] == "max_split_size_mb:256,expandable_segments:True"
    assert SEGMENTS.describe({GROWING: False}, {}) == []


@pytest.mark.cuda
@pytest.mark.parametrize("value", ["flash", "efficient"])
def test_the_kernel_that_is_named_runs_and_torch_is_left_as_it_was(value: str) -> None:
    made, recipe = in_half(), Recipe(criterion=functional.mse_loss)
    model, batch = made.build_model().cuda(), tuple(tensor.cuda() for tensor in made.batch(4))

    def looked_at() -> Any:
        with training(model, device="cuda", recipe=recipe) as each:
            return backends._kernels(each, batch, None, None)

    before = looked_at()
    kernels: set[str | None] = set()

    def note(function: Any, result: Any) -> None:
        if function is functional.scaled_dot_product_attention:
            kernels.add(backends._NAMES.get(type(result.grad_fn).__name__))

    live = training(model, KERNELS, device="cuda", recipe=recipe, settings={KERNEL: value})
    with live, backends.Calls(note):
        live.step(batch)
    assert kernels == {value}
    assert looked_at() == before


def test_cudnn_times_in_the_training_and_is_restored_after_a_failure() -> None:
    seen = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(torch.backends.cudnn.benchmark)
        return model(batch).mean()

    before, recipe = torch.backends.cudnn.benchmark, Recipe(loss_fn=loss_fn)
    live = training(nn.Conv2d(1, 1, 1), BENCHMARK, recipe=recipe, settings={CHOICE: True})
    with pytest.raises(RuntimeError), live:
        live.step(torch.randn(2, 3, 2, 2))
    assert seen == [True]
    assert torch.backends.cudnn.benchmark is before is False


@pytest.mark.cuda
def test_segments_grow_while_it_is_in_force_and_not_after() -> None:
    def grows() -> bool:
        torch.cuda.empty_cache()
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch's
        own = [s for s in segments if s["total_size"] >= held.nbytes]
        return any(segment["is_expandable"] for segment in own)

    assert not grows()
    model, batch = net().build_model().cuda(), net().batch(8)
    with training(model, SEGMENTS, device="cuda", settings={GROWING: True}) as live:
        live.step(batch)
        assert grows()
    assert not grows()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "workloads", "variants"),
    [
        ("attention", [in_half], (2, 3, 4)),
        ("convolution", [convolutions], (2,)),
        ("cuda_allocator", [attention, convolutions], (4,)),
    ],
)
def test_conformance(name: str, workloads: Any, variants: tuple[int, ...]) -> None:
    tried = check_strategy(name, workloads=workloads, device="cuda", capabilities=HOPPER)
    assert tried in variants


@pytest.mark.slow
def test_conformance_of_cudnns_choice_on_a_cpu() -> None:
    assert check_strategy("convolution", workloads=[convolutions], capabilities=HOPPER) == 2


@pytest.mark.cuda
def test_cudnns_choice_is_probed() -> None:
    trial = autofit.probe(convolutions(), plan=Plan(4, settings={CHOICE: True}), device="cuda")
    assert trial.ok, trial.measurement.detail
    assert trial.plan.settings[CHOICE] is True


@pytest.mark.cuda
def test_a_probe_of_segments_holds_no_more_than_pages_allow() -> None:
    held = []
    for value in (False, True):
        plan = Plan(8, settings={GROWING: value})
        trial = autofit.probe(net(), plan=plan, device="cuda", strategies=[SEGMENTS])
        assert trial.ok, trial.measurement.detail
        held.append(trial.measurement.peak_reserved_bytes or 0)
    assert held[1] <= held[0] + 40 * MIB
