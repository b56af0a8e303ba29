"""Tokens, model FLOPs, epochs and what they cost: said where they are known, and nowhere else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.cli.main import app
from autofit.errors import InvalidArgument
from autofit.report.record import Record
from autofit.report.report import Report

TOKENS = {"counted": "['input_ids']", "per_sample": 1000, "padding_share": 0.25}
FLOPS = {"per_sample": 5e12, "peak_per_second": 1e15}


@pytest.fixture
def known(record: Record) -> Record:
    search = replace(record.search, planned_samples=3_600_000)
    workload = {**record.workload, "tokens": TOKENS}
    return replace(record, workload=workload, findings={"flops": FLOPS}, search=search)


def rates(record: Record) -> dict[str, Any]:
    return json.loads(json.dumps(Report(record).to_dict()))["rates"]


def test_what_is_not_known_is_left_out(record: Record) -> None:
    assert rates(record) == {"best": {}, "baseline": {}}
    shown = Report(record).to_text(verbose=True)
    assert not any(word in shown for word in ("tokens", "FLOP", "epoch", "padding", "costs"))


def test_rates_follow_from_the_speed(known: Record) -> None:
    report = Report(known).with_costs(epoch_samples=7200, price_per_hour=3.0)
    found, speed = rates(report.record), {"best": 32 / 0.190, "baseline": 32 / 0.400}
    for name, each in speed.items():
        assert found[name] == pytest.approx(
            {
                "tokens_per_second": 1000 * each,
                "model_flops_per_second": 5e12 * each,
                "mfu": 0.005 * each,
                "epoch_seconds": 7200 / each,
                "epoch_cost": 6 / each,
                "training_seconds": 3_600_000 / each,
                "training_cost": 3000 / each,
            },
            rel=0.02,
        )
    assert Record.from_dict(report.to_dict()).to_dict() == report.to_dict()
    no_peak = {"flops": {**FLOPS, "peak_per_second": None}}
    assert rates(report.record)["best"].keys() - rates(replace(report.record, findings=no_peak))[
        "best"
    ].keys() == {"mfu"}


@pytest.mark.parametrize("form", [{"verbose": True, "width": 200}, "to_html", "to_markdown"])
def test_every_form_says_them(known: Record, form: Any) -> None:
    report = Report(known).with_costs(epoch_samples=7200, price_per_hour=3.0)
    shown = report.to_text(**form) if isinstance(form, dict) else getattr(report, form)()
    for said in ("tokens/s", "(MFU)", "epoch of 7,200 samples", "costs", "TFLOP/s",
                 "25% of them padding", "training of 3,600,000 samples"):  # fmt: skip
        assert said in shown


def test_the_command_line_takes_them_and_writes_them(
    known: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Report(known).save(tmp_path / "report.json")
    command = ["report", str(path), "--epoch-samples", "7200", "--price-per-hour", "3"]
    app([*command, "--out", str(path)], standalone_mode=False)
    assert "epoch of 7,200 samples" in capsys.readouterr().out
    assert json.loads(path.read_text())["search"]["price_per_hour"] == 3.0


@pytest.mark.parametrize(
    "given",
    [
        {"epoch_samples": 0},
        {"epoch_samples": 1.5},
        {"price_per_hour": -1},
        {"price_per_hour": math.nan},
        {"price_per_hour": math.inf},
        {"price_per_hour": "3 EUR"},
    ],
)
def test_what_is_no_count_and_no_price_is_refused(record: Record, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(InvalidArgument, match=name):
        Report(record).with_costs(**given)
