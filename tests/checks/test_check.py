"""`autofit.check`: verdicts by prediction, and by a real probe on the CPU device."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.checks.check import check
from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.prediction.predict import predict
from autofit.training.workload import Workload
from autofit.units import GIB, MIB


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512))


def workload(**options: Any) -> Workload:
    given = {"criterion": nn.functional.mse_loss} | options
    return Workload(build, (torch.randn(8, 512), torch.randn(8, 512)), **given)


def test_it_fits_by_prediction() -> None:
    verdict = check(workload(), vram_budget="2GiB", gpu="L4")
    assert verdict.fits is True
    assert verdict.method == "predict"
    assert verdict.required_bytes is not None
    assert verdict.headroom_bytes == 2 * GIB - verdict.required_bytes
    assert "2.00 GiB" in str(verdict)


def test_it_does_not_fit_by_prediction() -> None:
    verdict = check(workload(), plan=Plan(100_000), vram_budget="2GiB", gpu="L4")
    assert verdict.fits is False
    assert verdict.largest_micro_batch is not None
    smaller = Plan(verdict.largest_micro_batch)
    assert check(workload(), plan=smaller, vram_budget="2GiB", gpu="L4").fits
    assert str(smaller.micro_batch) in str(verdict)
    explained = verdict.explain()
    assert all(word in explained for word in ("required", "allowed", "activations", "weights"))


@pytest.mark.parametrize(
    ("tell", "asked"),
    [
        (check, {"gpu": True}),
        (check, {"plan": 8}),
        *((predict, {name: [3]}) for name in ("gpu", "plan", "calibration")),
    ],
)
def test_an_argument_of_another_kind_is_refused(tell: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(asked))):
        tell(workload(), **asked)


@pytest.mark.parametrize("given", [None, nn.Linear(2, 2), 7])
@pytest.mark.parametrize("tell", [check, predict])
def test_what_is_no_workload_is_refused(tell: Any, given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"autofit\.Workload\(model, sample_batch\)"):
        tell(given)


def test_the_margin_decides_between_required_and_budget() -> None:
    exact = check(workload(), vram_budget="2GiB", gpu="L4")
    assert exact.required_bytes is not None
    just_enough = check(workload(), vram_budget=exact.required_bytes + 1, gpu="L4")
    assert just_enough.fits is False
    assert just_enough.margin_bytes > 0


def test_without_a_budget_it_is_the_gpus_memory() -> None:
    assert 21 * GIB < check(workload(), gpu="L4").vram_budget_bytes < 24 * GIB
    half = check(workload(), gpu="L4", vram_budget=0.5).vram_budget_bytes
    assert 10 * GIB < half < 12 * GIB


def test_what_cannot_be_traced_is_undecided() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0]).mean()
        return loss * (1 if loss.item() > 0 else 2)

    made = workload(criterion=None, loss_fn=loss_fn)
    verdict = check(made, vram_budget="2GiB", gpu="L4")
    assert verdict.fits is None
    assert verdict.required_bytes is verdict.headroom_bytes is None
    assert "loss.item() > 0" in str(verdict)
    split = check(replace(made, global_batch=20), vram_budget="2GiB", gpu="L4")
    assert split.plan == Plan.split(20, 8)


def test_a_probe_on_the_cpu_device() -> None:
    enough = check(workload(), vram_budget="400MiB", device="cpu")
    assert (enough.fits, enough.method) == (True, "probe")
    assert enough.required_bytes is not None
    assert enough.required_bytes < 400 * MIB
    assert (enough.device, enough.gpu, enough.plan) == ("cpu", None, Plan(8))
    assert re.search("8 x 1.*400 MiB.*cpu", str(enough))
    little = check(workload(), vram_budget="60MiB", device="cpu")
    assert little.fits is False


def test_a_probe_opens_the_device_in_the_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened_here(name: str | None) -> None:
        raise AssertionError(f"{name} was opened in the caller's process")

    monkeypatch.setattr("autofit.devices.cuda.open_device", opened_here)
    verdict = check(workload(), vram_budget=400 * MIB, device="cpu")
    assert verdict.fits
    assert verdict.vram_budget_bytes == 400 * MIB


def test_a_gpu_and_a_device_are_refused_together() -> None:
    with pytest.raises(InvalidArgument, match=r"gpu='L4'.*device='cpu'"):
        check(workload(), vram_budget="2GiB", gpu="L4", device="cpu")


def make_without_loss(samples: int = 8) -> Workload:
    """A model that returns a plain tensor, and nobody said what its loss is."""
    return Workload(
        lambda: nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64)), torch.randn(samples, 64)
    )


@pytest.mark.parametrize("where", [{"gpu": "L4"}, {"device": "cpu"}], ids=["predicted", "probed"])
def test_a_check_without_a_loss_tells_nothing_unless_it_may(where: Any) -> None:
    """What stands in for a loss keeps less memory: a fit would be of another training."""
    verdict = check(make_without_loss(), vram_budget="2GiB", **where)
    assert verdict.fits is None
    assert "loss" in str(verdict)
    assert verdict.required_bytes is None
    allowed = check(make_without_loss(), vram_budget="2GiB", allow_stand_in_loss=True, **where)
    assert allowed.fits is True


def test_predictions_and_probes_say_what_stood_in_for_a_loss() -> None:
    made = make_without_loss()
    predicted = autofit.predict(made, gpu="L4")
    assert predicted.has_stand_in_loss
    assert "no loss" in str(predicted)
    assert predicted.to_dict()["has_stand_in_loss"] is True
    assert not autofit.predict(workload(), gpu="L4").has_stand_in_loss
    trial = autofit.probe(made, device="cpu", vram_budget="256MiB")
    assert "no loss" in str(trial)
