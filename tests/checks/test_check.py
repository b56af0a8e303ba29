"""A check: its verdict, and what it says beside an earlier one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.checks.check import check
from autofit.checks.probe import probe
from autofit.checks.verdict import Regression, Verdict, compare_with, read_fraction
from autofit.devices.gpu_catalogue import Gpu, find_gpu
from autofit.errors import InvalidArgument
from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Dimension, Plan
from autofit.prediction.predict import predict
from autofit.report.record import Record, SearchSummary
from autofit.training.workload import Workload
from autofit.units import GIB, MIB
from benchmarks.workload_models import GPT


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512))


def workload(**options: Any) -> Workload:
    given = {"criterion": nn.functional.mse_loss} | options
    return Workload(build, (torch.randn(8, 512), torch.randn(8, 512)), **given)


def predicted(workload: Workload, micro_batch: int = 8, vram_budget: Any = "2GiB") -> Any:
    return check(workload, plan=Plan(micro_batch), vram_budget=vram_budget, gpu="L4")


def test_what_fits_by_prediction_does_not_in_the_margin_above_what_is_required() -> None:
    enough = predicted(workload())
    assert (enough.fits, enough.method) == (True, "predict")
    assert enough.headroom_bytes == 2 * GIB - enough.required_bytes
    assert "2.00 GiB" in str(enough)
    just_enough = predicted(workload(), vram_budget=enough.required_bytes + 1)
    assert just_enough.fits is False
    assert just_enough.margin_bytes > 0


def test_what_does_not_fit_by_prediction_has_a_largest_micro_batch_that_does() -> None:
    verdict = predicted(workload(), 100_000)
    assert verdict.fits is False
    assert str(verdict.largest_micro_batch) in str(verdict)
    assert predicted(workload(), verdict.largest_micro_batch).fits
    explained = verdict.explain()
    assert all(word in explained for word in ("required", "VRAM budget", "activations", "weights"))


def test_a_model_that_refuses_one_sample_has_a_largest_micro_batch() -> None:
    """BatchNorm over single values raises ValueError at a micro-batch of 1."""
    normalized = nn.Sequential(nn.Linear(512, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 512))
    verdict = predicted(replace(workload(), model=normalized), 200_000)
    assert verdict.fits is False
    assert verdict.largest_micro_batch > 2


def test_what_cannot_be_traced_is_undecided() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0]).mean()
        return loss * (1 if loss.item() > 0 else 2)

    made = workload(criterion=None, loss_fn=loss_fn, global_batch=20)
    verdict = check(made, vram_budget="2GiB", gpu="L4")
    assert verdict.fits is None
    assert verdict.required_bytes is verdict.headroom_bytes is None
    assert "loss.item() > 0" in str(verdict)
    assert verdict.plan == Plan.split(20, 8)


def test_a_probe_on_the_cpu_device() -> None:
    enough: Any = check(workload(), vram_budget="400MiB", device="cpu")
    assert (enough.fits, enough.method) == (True, "probe")
    assert enough.required_bytes < 400 * MIB
    assert (enough.device, enough.gpu, enough.plan) == ("cpu", None, Plan(8))
    assert re.search("8 x 1.*400 MiB.*cpu", str(enough))
    assert check(workload(), vram_budget="60MiB", device="cpu").fits is False


@pytest.mark.parametrize("where", [{"gpu": "L4"}, {"device": "cpu"}], ids=["predicted", "probed"])
def test_a_check_without_a_loss_tells_nothing_unless_it_may(where: Any) -> None:
    """What stands in for a loss keeps less memory: a fit would be of another training."""
    without = Workload(
        lambda: nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64)), torch.randn(8, 64)
    )
    verdict = check(without, vram_budget="2GiB", **where)
    assert verdict.fits is verdict.required_bytes is None
    assert "loss" in str(verdict)
    assert check(without, vram_budget="2GiB", allow_stand_in_loss=True, **where).fits


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
@pytest.mark.parametrize("tell", [check, autofit.predict, predict, probe, autofit.soak])
def test_what_is_no_workload_is_refused(tell: Any, given: Any) -> None:
    takes_models = tell in (check, autofit.predict)
    words = "a Workload alone" if takes_models else r"autofit\.Workload\(model, sample_batch\)"
    with pytest.raises(InvalidArgument, match=words):
        tell(given, plan=Plan(2))


# -- Today's verdict against an earlier one


def verdict(method: str, required: int | None, peak: int | None = None, **more: Any) -> Verdict:
    return Verdict(
        True, Plan(8), method, 10**9, required_bytes=required, peak_allocated_bytes=peak, **more
    )


@pytest.fixture
def compared(tmp_path: Path) -> Callable[[object, Verdict], Regression]:
    """Compare a verdict with what an earlier one's file holds."""

    def compare(before: object, now: Verdict) -> Regression:
        (tmp_path / "before.json").write_text(json.dumps(before))
        return compare_with(now, tmp_path / "before.json", 0.05)

    return compare


@pytest.mark.parametrize(
    ("before", "now", "quantity", "growth"),
    [
        (verdict("predict", 1000, 900), verdict("predict", 1040, 900), "required bytes", 0.04),
        (verdict("probe", 1000, 500), verdict("predict", 2000, 505), "peak allocated bytes", 0.01),
    ],
    ids=["one method", "two methods"],
)
def test_verdicts_compare_what_they_have_in_common(
    compared: Any, before: Verdict, now: Verdict, quantity: str, growth: float
) -> None:
    regression = compared(before.to_dict(), now)
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
        workload={"fingerprint": "f00d", "parameters": 36, "sample_shapes": {}}
        | dict.fromkeys(("global_batch", "loss")),
        vram_budget_bytes=10**9,
        search=SearchSummary(1, 0, 1.0, "it was told to", 0),
        dimensions={"folding.level": Dimension([0, 1])},
        trials=(Trial(0, TrialKind.BASELINE, plan, measured),),
        best_number=0,
        baseline_number=0,
    ).to_dict()


ON_L4 = report("cuda:0", "NVIDIA L4")


def test_a_probe_compares_with_what_a_report_held(compared: Any) -> None:
    regression = compared(ON_L4, verdict("probe", 1100, 800, device="cuda", gpu="NVIDIA L4"))
    assert (regression.before_bytes, regression.now_bytes) == (1000, 1100)
    assert not regression.passed
    assert regression.differs == ()


def test_another_plan_gpu_or_method_is_named(compared: Any) -> None:
    now = replace(verdict("predict", 1100, 800, device="cuda", gpu="H200"), plan=Plan(16))
    assert re.search("8 x 1.*16 x 1.*L4.*H200.*probe", str(compared(ON_L4, now)))
    named_alike = verdict("probe", 1100, 800, device="cuda", gpu="L4")
    assert compared(ON_L4, named_alike).differs == ()


def test_bytes_on_the_cpu_are_not_held_against_a_gpus(compared: Any) -> None:
    before = report("cpu", None)
    with pytest.raises(InvalidArgument, match=r"cpu.*L4"):
        compared(before, verdict("predict", 1100, 800, device="cuda", gpu="L4"))
    assert compared(before, verdict("predict", 1100, 800, device="cpu")).passed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (verdict("predict", 1000).to_dict(), "cannot be compared"),
        *((each, r"before\.json") for each in ([1000], ["best"], "1000", 1000, None, {"best": 3})),
        ({"plan": {"settings": None}}, r"before\.json"),
    ],
)
def test_what_is_no_earlier_verdict_or_has_nothing_in_common_is_refused(
    compared: Any, content: object, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        compared(content, verdict("probe", None))


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
def test_a_check_against_nothing_is_refused_and_against_a_size_or_a_budget_assumes_a_gpu() -> None:
    with pytest.raises(InvalidArgument, match="nothing to check against"):
        check(workload())
    assert check(workload(), vram_budget="2GiB").gpu_assumed
    of_a_size = check(workload(), gpu="8GiB")
    assert of_a_size.vram_budget_bytes < 8 * GIB
    assert "assumed" in str(of_a_size)


# -- A table of GPUs: what it tells of a GPU is what a prediction for that GPU alone tells.


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


def test_gpus_that_answer_alike_take_the_dry_runs_of_one(tmp_path: Path) -> None:
    def marks(*names: str) -> int:
        file = tmp_path / "-".join(names)

        def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with file.open("a") as runs:  # in whichever process
                runs.write(".")
            return model(batch).square().mean()

        workload = Workload(nn.Linear(64, 64), torch.randn(8, 64), loss_fn=loss_fn)
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
