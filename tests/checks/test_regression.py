"""Today's verdict against an earlier one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit import (
    Dimension,
    InvalidArgument,
    Measurement,
    Outcome,
    Plan,
    Trial,
    TrialKind,
    Verdict,
)
from autofit.checks.verdict import compare_with, read_fraction
from autofit.report.record import Record, SearchSummary


def verdict(method: str, required: int | None, peak: int | None) -> Verdict:
    return Verdict(True, Plan(8), method, 10**9, required_bytes=required, peak_allocated_bytes=peak)


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "before.json"
    path.write_text(json.dumps(content))
    return path


def test_verdicts_of_one_method_compare_required_bytes(tmp_path: Path) -> None:
    before = written(tmp_path, verdict("predict", 1000, 900).to_dict())
    regression = compare_with(verdict("predict", 1040, 900), before, 0.05)
    assert regression.quantity == "required bytes"
    assert regression.growth == pytest.approx(0.04)
    assert regression.passed


def test_verdicts_of_two_methods_compare_peak_allocated(tmp_path: Path) -> None:
    before = written(tmp_path, verdict("probe", 1000, 500).to_dict())
    regression = compare_with(verdict("predict", 2000, 505), before, 0.05)
    assert regression.quantity == "peak allocated bytes"
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


def test_a_file_that_does_not_say_its_device_can_be_read(tmp_path: Path) -> None:
    now = replace(verdict("predict", 1000, 900), device="cuda", gpu="L4")
    older = now.to_dict()
    for name in ("device", "gpu", "gpu_assumed"):
        del older[name]
    regression = compare_with(now, written(tmp_path, older), 0.05)
    assert (regression.growth, regression.differs) == (0.0, ())


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    before = written(tmp_path, verdict("predict", 1000, None).to_dict())
    with pytest.raises(InvalidArgument, match="cannot be compared"):
        compare_with(verdict("probe", None, None), before, 0.05)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"absent\.json"):
        compare_with(verdict("probe", 1, 1), tmp_path / "absent.json", 0.05)


@pytest.mark.parametrize(
    "content", [[1000], ["best"], "1000", 1000, None, {"best": 3}, {"plan": {"settings": None}}]
)
def test_json_that_is_no_earlier_verdict_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(InvalidArgument, match=r"before\.json"):
        compare_with(verdict("probe", 1, 1), written(tmp_path, content), 0.05)


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.1", 0.1), (" 12.5 % ", 0.125)])
def test_fractions(text: str, value: float) -> None:
    assert read_fraction(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "five", "-5%", "5%%"])
def test_what_is_no_fraction_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="fraction"):
        read_fraction(text)


def test_a_whole_number_that_may_mean_percent_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"1%.*100%"):
        read_fraction("1")
    assert read_fraction("100%") == 1.0
