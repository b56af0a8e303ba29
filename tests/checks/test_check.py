"""A check: its verdict, and what it says beside an earlier one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.checks.check import check
from autofit.checks.probe import probe
from autofit.checks.verdict import Verdict, compare_with, read_fraction
from autofit.errors import InvalidArgument
from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Dimension, Plan
from autofit.prediction.predict import predict
from autofit.report.record import Record, SearchSummary
from autofit.training.workload import Workload
from autofit.units import GIB, MIB


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512))


def workload(**options: Any) -> Workload:
    given = {"criterion": nn.functional.mse_loss} | options
    return Workload(build, (torch.randn(8, 512), torch.randn(8, 512)), **given)


def test_it_fits_by_prediction() -> None:
    verdict: Any = check(workload(), vram_budget="2GiB", gpu="L4")
    assert verdict.fits is True
    assert verdict.method == "predict"
    assert verdict.headroom_bytes == 2 * GIB - verdict.required_bytes
    assert "2.00 GiB" in str(verdict)


def test_it_does_not_fit_by_prediction() -> None:
    verdict: Any = check(workload(), plan=Plan(100_000), vram_budget="2GiB", gpu="L4")
    assert verdict.fits is False
    smaller = Plan(verdict.largest_micro_batch)
    assert check(workload(), plan=smaller, vram_budget="2GiB", gpu="L4").fits
    assert str(smaller.micro_batch) in str(verdict)
    explained = verdict.explain()
    assert all(word in explained for word in ("required", "VRAM budget", "activations", "weights"))


def test_a_model_that_refuses_one_sample_has_a_largest_micro_batch() -> None:
    """BatchNorm over single values raises ValueError at a micro-batch of 1."""

    def normalized() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 512))

    given = replace(workload(), model=normalized)
    verdict: Any = check(given, plan=Plan(200_000), vram_budget="2GiB", gpu="L4")
    assert verdict.fits is False
    assert verdict.largest_micro_batch > 2


@pytest.mark.parametrize(
    ("tell", "asked", "words"),
    [
        (check, {"gpu": True}, "gpu"),
        (check, {"plan": 8}, "plan"),
        (check, {"gpu": "L4", "device": "cpu"}, r"gpu='L4'.*device='cpu'"),
        *((predict, {name: [3]}, name) for name in ("gpu", "plan", "calibration")),
    ],
)
def test_an_argument_of_another_kind_is_refused(
    tell: Any, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        tell(workload(), **asked)


@pytest.mark.parametrize("given", [None, nn.Linear(2, 2), 7])
@pytest.mark.parametrize("tell", [check, predict, probe])
def test_what_is_no_workload_is_refused(tell: Any, given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"autofit\.Workload\(model, sample_batch\)"):
        tell(given)


def test_the_margin_decides_between_required_and_budget() -> None:
    exact: Any = check(workload(), vram_budget="2GiB", gpu="L4")
    just_enough = check(workload(), vram_budget=exact.required_bytes + 1, gpu="L4")
    assert just_enough.fits is False
    assert just_enough.margin_bytes > 0


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
    enough: Any = check(workload(), vram_budget="400MiB", device="cpu")
    assert (enough.fits, enough.method) == (True, "probe")
    assert enough.required_bytes < 400 * MIB
    assert (enough.device, enough.gpu, enough.plan) == ("cpu", None, Plan(8))
    assert re.search("8 x 1.*400 MiB.*cpu", str(enough))
    little = check(workload(), vram_budget="60MiB", device="cpu")
    assert little.fits is False


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


# -- Today's verdict against an earlier one


def verdict(method: str, required: int | None, peak: int | None) -> Verdict:
    return Verdict(True, Plan(8), method, 10**9, required_bytes=required, peak_allocated_bytes=peak)


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "before.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("before", "now", "quantity", "growth"),
    [
        (verdict("predict", 1000, 900), verdict("predict", 1040, 900), "required bytes", 0.04),
        (verdict("probe", 1000, 500), verdict("predict", 2000, 505), "peak allocated bytes", 0.01),
    ],
    ids=["one method", "two methods"],
)
def test_verdicts_compare_what_they_have_in_common(
    tmp_path: Path, before: Verdict, now: Verdict, quantity: str, growth: float
) -> None:
    regression = compare_with(now, written(tmp_path, before.to_dict()), 0.05)
    assert regression.quantity == quantity
    assert regression.growth == pytest.approx(growth)
    assert regression.passed


def report(device: str, gpu: str | None) -> dict[str, Any]:
    """Of a search whose only trial held 1000 bytes."""
    measured = Measurement(
        Outcome.OK,
        step_times_s=[0.1],
        peak_reserved_bytes=900,
        non_torch_bytes=100,
        peak_allocated_bytes=800,
    )
    plan = Plan(8, settings={"folding.level": 0})
    return Record(
        version="0.1.0",
        created="2026-01-02T03:04:05Z",
        environment={"device": device, "gpu": gpu, "torch": "2.13.0"},
        workload={
            "fingerprint": "f00d",
            "parameters": 36,
            "global_batch": None,
            "loss": None,
            "sample_shapes": {},
        },
        vram_budget_bytes=10**9,
        search=SearchSummary(1, 0, 1.0, "it was told to", 0),
        dimensions={"folding.level": Dimension([0, 1])},
        trials=(Trial(0, TrialKind.BASELINE, plan, measured),),
        best_number=0,
        baseline_number=0,
    ).to_dict()


def test_a_probe_compares_with_what_a_report_held(tmp_path: Path) -> None:
    before = written(tmp_path, report("cuda:0", "NVIDIA L4"))
    now = replace(verdict("probe", 1100, 800), device="cuda", gpu="NVIDIA L4")
    regression = compare_with(now, before, 0.05)
    assert (regression.before_bytes, regression.now_bytes) == (1000, 1100)
    assert not regression.passed
    assert regression.differs == ()


def test_another_plan_gpu_or_method_is_named(tmp_path: Path) -> None:
    before = written(tmp_path, report("cuda:0", "NVIDIA L4"))
    now = replace(verdict("predict", 1100, 800), device="cuda", gpu="H200", plan=Plan(16))
    line = str(compare_with(now, before, 0.05))
    assert re.search("8 x 1.*16 x 1.*L4.*H200.*probe", line)
    named_alike = replace(now, gpu="L4", plan=Plan(8), method="probe")
    assert compare_with(named_alike, before, 0.05).differs == ()


def test_bytes_on_the_cpu_are_not_held_against_a_gpus(tmp_path: Path) -> None:
    before = written(tmp_path, report("cpu", None))
    now = replace(verdict("predict", 1100, 800), device="cuda", gpu="L4")
    with pytest.raises(InvalidArgument, match=r"cpu.*L4"):
        compare_with(now, before, 0.05)
    assert compare_with(replace(now, device="cpu", gpu=None), before, 0.05).passed


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    before = written(tmp_path, verdict("predict", 1000, None).to_dict())
    with pytest.raises(InvalidArgument, match="cannot be compared"):
        compare_with(verdict("probe", None, None), before, 0.05)


@pytest.mark.parametrize(
    "content", [[1000], ["best"], "1000", 1000, None, {"best": 3}, {"plan": {"settings": None}}]
)
def test_json_that_is_no_earlier_verdict_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(InvalidArgument, match=r"before\.json"):
        compare_with(verdict("probe", 1, 1), written(tmp_path, content), 0.05)


@pytest.mark.parametrize(
    ("text", "value"), [("5%", 0.05), ("0.1", 0.1), (" 12.5 % ", 0.125), ("100%", 1.0)]
)
def test_fractions(text: str, value: float) -> None:
    assert read_fraction(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [*((text, "fraction") for text in ("", "five", "-5%", "5%%")), ("1", r"1%.*100%")],
)
def test_what_is_no_fraction_or_may_mean_percent_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_fraction(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_a_check_against_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="nothing to check against"):
        check(workload())
    assert check(workload(), vram_budget="2GiB").gpu_assumed


def test_a_size_as_a_gpu_is_said_to_be_assumed() -> None:
    verdict = check(workload(), gpu="8GiB")
    assert verdict.vram_budget_bytes < 8 * GIB
    assert verdict.notes
    assert "assumed" in str(verdict)
