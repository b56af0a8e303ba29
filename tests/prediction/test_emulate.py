"""Predictions by real training on an emulated GPU, held against probes there."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autofit
from autofit.checks.check import check
from autofit.cli.main import app
from autofit.devices.gpus import find_gpu
from autofit.emulation import build
from autofit.emulation.errors import EmulationUnavailable
from autofit.errors import CannotTell, InvalidRequest
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.emulate import Emulation, error_bounds
from autofit.prediction.predict import Prediction, predict
from autofit.probing.messages import ProbeRequest
from autofit.training.workload import Workload
from autofit.units import MIB

GPU = "L4"
PAGE_BYTES = 2 * MIB


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


def workload(**options: Any) -> Workload:
    given: dict[str, Any] = {"model": build_model, "criterion": nn.functional.mse_loss} | options
    batch = (torch.randn(8, 512), torch.randn(8, 512))
    return Workload(given.pop("model"), batch, **given)


def emulated(made: Workload, **options: Any) -> Prediction:
    return predict(made, gpu=GPU, method="emulate", **options)


class Doubled(torch.autograd.Function):
    """Keeps twice its input for its backward pass, as no operator of torch does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.cat([x, x]))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (twice,) = ctx.saved_tensors
        gradient: torch.Tensor = gradients[0] * 2 + 0 * twice[: len(gradients[0])]
        return gradient


class WithDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = Doubled.apply(self.layer(x))  # type: ignore[no-untyped-call]  # torch
        return doubled


class Careful(torch.optim.Optimizer):
    """Keeps a second copy of each gradient that is not zero, which takes its values."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded there
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.norm().item() > 0:
                    self.state[parameter]["last"] = parameter.grad.clone()
                    parameter.sub_(parameter.grad, alpha=1e-3)


def larger_if_positive(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    if loss.item() > 0:  # a loss that nobody computed is 0
        loss = loss + 0 * model(torch.cat([batch[0]] * 64)).square().mean()
    return loss


def until_it_is_small(model: nn.Module, batch: Any) -> torch.Tensor:
    scale = torch.ones((), device=batch[0].device)
    while scale.item() != 0.25:  # never so where nothing computes
        scale = scale / 2
    return nn.functional.mse_loss(model(batch[0]), batch[1]) * scale


@pytest.mark.emulated
def test_it_needs_what_a_rehearsal_says() -> None:
    made = workload()
    told, rehearsed = emulated(made), predict(made, gpu=GPU, method="rehearse")
    assert (told.method, told.computed_values) == ("emulate", False)
    assert (rehearsed.method, rehearsed.computed_values) == ("rehearse", None)
    assert told.peak_allocated_bytes == pytest.approx(rehearsed.peak_allocated_bytes, abs=2048)
    for kind in ("weights", "gradients", "optimizer_state", "activations", "temporaries"):
        assert told.breakdown[kind] == pytest.approx(rehearsed.breakdown[kind], abs=2048), kind
    parts = sum(size for kind, size in told.breakdown.items() if kind != "non_torch")
    assert parts == told.peak_allocated_bytes
    low, high = told.interval
    assert low <= told.required_bytes <= high
    assert told.fits(high) is True
    assert told.fits(high - 1) is told.fits(low) is None
    assert told.fits(low - 1) is False
    assert "emulated GPU, computing no values" in str(told)
    assert "emulated GPU" in told._repr_html_()
    assert told.to_dict()["method"] == "emulate"


@pytest.mark.emulated
def test_required_bytes_are_where_a_probe_begins_to_run() -> None:
    """A flush of the cache in the warm-up makes room, so less than peak reserved is enough."""

    def pyramid() -> nn.Module:
        widths = [512, 4096, 1024, 3072, 512]
        layers = (nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths))
        return nn.Sequential(*layers)

    made, resolved = workload(model=pyramid), ResolvedPlan(Plan(1000))
    with Emulation(made, (), find_gpu(GPU)) as emulation:
        need = emulation.need(resolved)
        required, seen = need.required_bytes, {}
        for budget in (required - PAGE_BYTES, required, required + PAGE_BYTES):
            request = ProbeRequest(resolved, vram_budget_bytes=budget, steps=3)
            seen[budget - required] = emulation.worker().probe(request).measurement
    assert seen[0].outcome is seen[PAGE_BYTES].outcome is Outcome.OK, seen
    assert seen[0].allocator_retries == seen[PAGE_BYTES].allocator_retries == 0
    less = seen[-PAGE_BYTES]
    assert less.outcome in (Outcome.OOM, Outcome.RETRIES), less
    assert need.limit_bytes < need.ample.peak_reserved_bytes


@pytest.mark.emulated
def test_a_branch_on_a_value_is_decided_by_the_value() -> None:
    made, plain = workload(criterion=None, loss_fn=larger_if_positive), workload()
    with pytest.raises(CannotTell, match=r"loss\.item\(\) > 0"):
        predict(made, gpu=GPU, method="rehearse")
    told = emulated(made)
    assert told.computed_values
    assert told.peak_allocated_bytes > emulated(plain).peak_allocated_bytes + MIB
    assert "computing values" in str(told)


@pytest.mark.emulated
def test_a_loop_that_waits_for_a_value_ends() -> None:
    assert emulated(workload(criterion=None, loss_fn=until_it_is_small)).computed_values


@pytest.mark.emulated
def test_a_function_of_autograd_of_the_users_own() -> None:
    told = emulated(workload(model=WithDoubled))
    assert told.computed_values is False
    assert told.breakdown["activations"] > 3 * 8 * 512 * 4


@pytest.mark.emulated
def test_an_optimizer_that_looks_at_values() -> None:
    told = emulated(workload(optimizer=Careful))
    assert told.computed_values
    with pytest.raises(CannotTell, match=r"largest micro-batch.*host memory"):
        told.largest_micro_batch_within(2**50)
    weights = sum(p.numel() * 4 for p in build_model().parameters())
    assert told.breakdown["optimizer_state"] >= weights


@pytest.mark.emulated
def test_a_gradient_scaler_asks_for_nothing_that_matters() -> None:
    told = emulated(workload(), plan=Plan(8, settings={"precision.dtype": "float16"}))
    assert told.computed_values is False


@pytest.mark.emulated
def test_convolutions_are_estimates_and_widen_the_interval() -> None:
    def images() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.LazyLinear(10))

    def made() -> nn.Module:
        model = images()
        model(torch.zeros(1, 3, 32, 32))
        return model

    batch = (torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.long))
    images_workload = Workload(made, batch, criterion=nn.functional.cross_entropy)
    told = emulated(images_workload)
    assert told.estimates == ("cuDNN: workspaces of convolutions in float32",)
    assert "estimated" in str(told)
    limit = told.required_bytes - told.breakdown["non_torch"]
    least, _ = error_bounds(told.estimates)
    assert least < -0.05
    assert told.interval[1] - told.required_bytes == pytest.approx(
        limit / (1 + least) - limit, abs=2
    )
    verdict = check(images_workload, gpu=GPU, method="emulate", vram_budget=told.required_bytes)
    assert verdict.fits is None
    assert re.search(
        r"could not be told.*emulated \(.* to .*\).*convolutions in float32", str(verdict)
    )
    assert verdict.to_dict()["estimates"] == list(told.estimates)


def test_estimates_that_no_recording_knows_have_the_widest_bounds() -> None:
    widest = error_bounds(["cuDNN: workspaces of convolutions in float32"])
    assert error_bounds(["cufftCreate"]) == widest
    assert error_bounds([])[0] > widest[0]
    half = error_bounds(["cuDNN: workspaces of convolutions in half precision"])
    assert error_bounds([]) != half != widest


@pytest.mark.emulated
def test_the_largest_micro_batch_runs_and_the_next_does_not() -> None:
    budget = 900 * MIB
    told = emulated(workload())
    largest = told.largest_micro_batch_within(budget)
    assert largest is not None
    assert emulated(workload(), plan=Plan(largest)).fits(budget) is True
    more = largest + max(largest // 100, 1)
    assert emulated(workload(), plan=Plan(more)).fits(budget) is not True


@pytest.mark.emulated
def test_a_plan_that_is_larger_than_the_gpu_has_numbers() -> None:

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 65536), nn.GELU(), nn.Linear(65536, 16))

    made = Workload(wide, (torch.randn(8, 16),), loss_fn=lambda model, batch: model(*batch).mean())
    told = emulated(made, plan=Plan(40_000))
    assert told.required_bytes > find_gpu(GPU).total_bytes
    assert told.fits(find_gpu(GPU).total_bytes) is False


@pytest.mark.slow
@pytest.mark.emulated
def test_a_setting_that_is_found_by_running_the_model() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(*(build_model() for _ in range(4)))

    made = workload(model=deep)
    level = Plan(4096, settings={"checkpointing.level": 1})
    with pytest.raises(CannotTell):
        predict(made, gpu=GPU, method="rehearse", plan=level)
    plain = predict(made, gpu=GPU, method="rehearse", plan=Plan(4096))
    assert emulated(made, plan=level).peak_allocated_bytes < plain.peak_allocated_bytes


@pytest.mark.emulated
def test_nothing_of_the_users_changes() -> None:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    made = workload(model=model, optimizer=optimizer)
    weights = [weight.clone() for weight in model.parameters()]
    state = torch.get_rng_state()
    assert emulated(made).method == "emulate"
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, weights, model.parameters()))
    assert not optimizer.state


@pytest.mark.emulated
def test_an_error_of_the_users_is_the_users() -> None:
    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        raise LookupError("of the user's own")

    with pytest.raises(LookupError, match="of the user's own"):
        emulated(workload(criterion=None, loss_fn=failing))


@pytest.mark.emulated
def test_check_emulates_by_itself_where_there_is_no_gpu() -> None:
    verdict = check(workload(), gpu=GPU, vram_budget="2GiB")
    assert (verdict.method, verdict.fits, verdict.computed_values) == ("emulate", True, False)
    assert "emulated" in str(verdict)
    assert "emulated GPU" in verdict._repr_html_()
    on_meta = build_model().to("meta")
    assert check(workload(model=on_meta), gpu=GPU, vram_budget="2GiB").method == "rehearse"


@pytest.mark.emulated
def test_auto_rehearses_what_asks_for_values_of_the_batch_alone() -> None:
    def masked(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, mask = batch
        kept = inputs if mask.all() else inputs[:, :256].repeat(1, 2)
        loss: torch.Tensor = model(kept).square().mean()
        return loss

    batch = (torch.randn(8, 512), torch.ones(8, 4, dtype=torch.bool))
    made = Workload(build_model, batch, loss_fn=masked)
    assert predict(made, gpu=GPU).method == "rehearse"
    told = predict(workload(criterion=None, loss_fn=larger_if_positive), gpu=GPU)
    assert (told.method, told.computed_values) == ("emulate", True)


@pytest.mark.emulated
def test_the_command_line(tmp_path: Any) -> None:
    (tmp_path / "emulated_job.py").write_text(
        "import torch\nfrom autofit import Workload\n"
        "def make():\n"
        "    batch = (torch.randn(8, 64), torch.randn(8, 64))\n"
        "    return Workload(lambda: torch.nn.Linear(64, 64), batch,\n"
        "                    criterion=torch.nn.functional.mse_loss)\n"
    )
    target = f"{tmp_path}/emulated_job.py:make"
    told = CliRunner().invoke(app, ["check", target, "--gpu", GPU, "--method", "emulate", "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["method"] == "emulate"
    small = "700MiB"  # whose largest micro-batch, which is told too, takes a moment
    shown = CliRunner().invoke(app, ["predict", target, "--gpu", small, "--method", "emulate"])
    assert "on an emulated GPU" in shown.stdout


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        build.find_cuda_torch()
    except EmulationUnavailable:
        with pytest.raises(EmulationUnavailable, match=r"CUDA build of torch.*pip install torch"):
            emulated(workload())
        assert predict(workload(), gpu=GPU).method == "rehearse"
        return
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    build._compiler.cache_clear()
    try:
        with pytest.raises(EmulationUnavailable, match="install a C\\+\\+ compiler"):
            emulated(workload())
        with pytest.raises(EmulationUnavailable, match="install a C\\+\\+ compiler"):
            check(workload(), gpu=GPU, method="emulate")
        assert predict(workload(), gpu=GPU).method == "rehearse"
    finally:
        build._compiler.cache_clear()


def test_a_method_that_there_is_not() -> None:
    with pytest.raises(InvalidRequest, match="auto, rehearse, emulate"):
        autofit.predict(workload(), method="guess")
