"""A longer training of a plan or a report: what held, and what deviates."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.checks.soak import SoakResult, compare
from autofit.codec import to_json
from autofit.errors import InvalidArgument
from autofit.measurement import Measurement, Outcome, RankUse, TrialKind
from autofit.units import GIB, MIB

STEPS = 36


class Net(nn.Sequential):
    """Two layers, enough work for a step to be timed."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).square().mean()  # type: ignore[no-untyped-call]  # torch


def net() -> nn.Module:
    return Net(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))


@pytest.fixture(scope="module")
def workload() -> autofit.Workload:
    torch.manual_seed(0)
    return autofit.Workload(net(), torch.randn(8, 32))


@pytest.fixture(scope="module")
def report(workload: autofit.Workload) -> autofit.Report:
    return autofit.search(
        workload, device="cpu", vram_budget="32MiB", strategies=["precision"], max_probes=3
    )


def test_a_healthy_plan_holds_its_peak(report: autofit.Report, workload: autofit.Workload) -> None:
    endured = autofit.soak(workload, plan=report, steps=STEPS)
    assert endured.measurement.ok
    assert endured.steps == STEPS
    told = report.record.recommended.measurement
    assert endured.measurement.peak_allocated_bytes == told.peak_allocated_bytes
    assert not any("peak" in line or "loss" in line for line in endured.deviations)
    shown = endured.plan.without(report.record.default_settings)
    assert shown != endured.plan
    assert str(endured).startswith(f"{shown}: {STEPS} steps\n"), "without settings at their default"
    assert endured.to_dict()["plan"] == to_json(report.plan)
    (note,) = (note for note in report.record.notes if "VRAM budget" in note)
    assert "process" in note


def test_a_soak_of_a_report_is_compared_with_it(
    report: autofit.Report, workload: autofit.Workload, tmp_path: Path
) -> None:
    held = autofit.soak(workload, plan=report, steps=8)
    assert held.ok
    assert held.plan == report.plan
    assert held.expected == report.record.recommended
    report.save(tmp_path / "report.json")
    loaded = autofit.load(tmp_path / "report.json")
    assert autofit.soak(workload, plan=loaded, steps=8).steps == 8
    alone = autofit.probe(workload, plan=report, device="cpu", vram_budget="32MiB")
    assert not isinstance(alone, SoakResult)
    assert alone.ok


def test_a_soak_of_a_plan_is_compared_with_a_probe_of_it(workload: autofit.Workload) -> None:
    plan = autofit.Plan(4, accumulation_steps=2, settings={"precision.dtype": "bfloat16"})
    held = autofit.soak(workload, plan=plan, steps=12, device="cpu", vram_budget="32MiB")
    then, now = held.expected.measurement, held.measurement
    assert (held.steps, held.vram_budget_bytes) == (12, 32 * MIB)
    assert then.ok
    assert then.peak_allocated_bytes == now.peak_allocated_bytes
    assert held.plan.samples_per_step == 8
    assert plan.settings.items() <= held.plan.settings.items()
    assert not any("peak" in line for line in held.deviations)
    assert str(held).startswith(f"{plan}: 12 steps\n"), "without settings at their default"


def test_a_soak_of_a_plan_that_does_not_fit_says_so() -> None:
    large = autofit.Workload(Net(nn.Linear(32, 2**16), nn.ReLU()), torch.randn(8, 32))
    held = autofit.soak(large, plan=autofit.Plan(8), device="cpu", vram_budget="8MiB", steps=8)
    assert not held.passed
    assert held.deviations[0].startswith("it ended with ")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 7}, "8 steps or more"),
        ({"steps": 8.5}, "steps must be a whole number"),
        ({"plan": None}, "soak needs a plan"),
        ({"plan": "fast"}, "plan must be an autofit.Plan"),
        ({"strategies": ["nothing"]}, "nothing"),
    ],
)
def test_what_cannot_be_soaked_is_refused_in_words(
    workload: autofit.Workload, given: dict[str, Any], words: str
) -> None:
    asked: dict[str, Any] = {"plan": autofit.Plan(8), "device": "cpu"}
    with pytest.raises(InvalidArgument, match=words):
        autofit.soak(workload, **(asked | given))


@pytest.mark.slow
def test_the_command_line_soaks_a_report_also_of_a_changed_accumulation(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from autofit import Workload\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))\n"
        "workload = Workload(model, torch.randn(4, 8), global_batch=8)\n"
    )
    here = ("train.py:workload", "--device", "cpu")
    limits = ("--vram-budget=4MiB", "--strategies=precision", "--max-probes=2", "--out=r.json")
    command = ("-m", "autofit", "search", *here, "--allow-accumulation-change", *limits)
    searched = run_python(*command, cwd=tmp_path)
    assert searched.returncode == 0, searched.stderr
    longer = ("--plan-from=r.json", "--steps=36", "--json")
    soaked = run_python("-m", "autofit", "soak", *here, *longer, cwd=tmp_path)
    said = json.loads(soaked.stdout)
    assert soaked.returncode == (0 if said["passed"] else 1)
    assert said["steps"] == 36
    assert said["measurement"]["outcome"] == "ok"
    assert said["plan"] == json.loads((tmp_path / "r.json").read_text())["recommended"]["plan"]


class LateLeak(nn.Module):
    """Keeps what it computes from a certain call on, as a cache of evaluations may."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.first, self.last, self.calls = first, last, 0
        self.kept: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output: torch.Tensor = self.layer(inputs)
        if self.first <= self.calls <= self.last:
            self.kept.append(output.detach().repeat(64, 1))
        return output.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "strayed"),
    [(10**6, "it ended with leak"), (60, "peak allocated rose")],
    ids=["from then on", "once"],
)
def test_what_is_kept_late_is_found_on_the_cpu_too(last: int, strayed: str) -> None:
    workload = autofit.Workload(LateLeak(60, last), torch.randn(8, 32))
    here: Any = {"device": "cpu"}
    options = autofit.SearchOptions(max_micro_batch=8)
    report = autofit.search(
        workload, vram_budget="32MiB", strategies=[], max_probes=2, options=options, **here
    )
    assert report.best.ok
    held = autofit.soak(workload, plan=report, steps=80, **here)
    assert any(line.startswith(strayed) for line in held.deviations)


@pytest.mark.parametrize(
    ("model", "samples", "words"),
    [
        (nn.Linear(32, 32), 8, "parameters.*16672.*1056"),
        (net, 4, r"samples.*\[8, 32\].*\[4, 32\]"),
        (nn.Sequential(net()), 8, "the model's code or options.* changed"),
    ],
)
def test_another_workload_is_refused_with_what_differs(
    report: autofit.Report, model: Any, samples: int, words: str
) -> None:
    other = autofit.Workload(model, torch.randn(samples, 32))
    with pytest.raises(InvalidArgument, match=words):
        autofit.soak(other, plan=report, steps=STEPS)


TOLD = Measurement(
    Outcome.OK,
    step_times_s=[0.10] * 11 + [0.11] * 9,
    peak_allocated_bytes=GIB,
    peak_reserved_bytes=GIB + 100 * MIB,
    loss=2.0,
)
SEEN = replace(TOLD, step_times_s=[0.1] * 20, loss=1.0)


@pytest.mark.parametrize(
    ("seen", "strayed"),
    [
        (SEEN, None),
        (replace(SEEN, peak_allocated_bytes=GIB + 20 * MIB), "peak allocated rose"),
        (replace(SEEN, step_times_s=[0.12] * 20), "the median step took 120 ms"),
        (replace(SEEN, step_times_s=[0.1] * 15 + [0.2] * 5), "slowed down from 100 ms to 200 ms"),
        (replace(SEEN, step_times_s=[0.1] * 6 + [0.2] * 2), None),
        (replace(SEEN, loss=2.2), "the loss rose from 2 to 2.2"),
        (replace(SEEN, loss=2.2, step_times_s=[0.1] * 8), None),
        (Measurement(Outcome.LEAK, "1 MiB a step"), "it ended with leak: 1 MiB a step"),
    ],
    ids=[
        "all held",
        "peak",
        "speed",
        "drift",
        "too short for a drift",
        "loss",
        "too short for the loss",
        "leak",
    ],
)
def test_what_differs_is_named(seen: Measurement, strayed: str | None) -> None:
    lines = compare(TOLD, seen)
    assert len(lines) == (strayed is not None)
    assert all(strayed is not None and strayed in line for line in lines)


def of_two_ranks(seen: Measurement, *peaks: int) -> Measurement:
    """Return the measurement with a first rank that is slower by half than the second."""
    times = (0.12, 0.08)
    return replace(
        seen,
        peak_allocated_bytes=max(peaks),
        ranks=[RankUse(peak, peak, 0, time) for peak, time in zip(peaks, times, strict=True)],
    )


def test_each_rank_is_held_to_its_own_peak() -> None:
    told = of_two_ranks(TOLD, 2 * GIB, GIB)
    assert compare(told, of_two_ranks(SEEN, 2 * GIB, GIB + MIB)) == ()
    (line,) = compare(told, of_two_ranks(SEEN, 2 * GIB, GIB + 100 * MIB))
    assert line == "rank 1: peak allocated rose from 1.00 GiB to 1.10 GiB"
    (line,) = compare(TOLD, of_two_ranks(SEEN, 2 * GIB, GIB))  # the ranks' own are not known
    assert line == "peak allocated rose from 1.00 GiB to 2.00 GiB"


def test_speed_is_not_compared_on_a_busy_machine(report: autofit.Report) -> None:
    slower = replace(SEEN, step_times_s=[0.12] * 15 + [0.3] * 5, peak_allocated_bytes=2 * GIB)
    (line,) = compare(TOLD, slower, busy=True)
    assert line.startswith("peak")
    best = replace(report.best, measurement=TOLD)
    idle = SoakResult(
        *(0, TrialKind.SEARCH, best.plan, slower), expected=best, vram_budget_bytes=2 * GIB
    )
    assert idle.compared == ("peak", "speed", "loss")
    assert str(idle).splitlines()[-1].endswith("peak, speed, loss")
    busy = replace(idle, busy="load 7.0 on 2 cores")
    assert "load 7.0 on 2 cores" in str(busy)
    assert busy.to_dict()["busy"] == busy.busy
    assert busy.compared == ("peak", "loss")
    assert "speed" not in str(busy).splitlines()[-1]


def test_no_speed_is_compared_with_that_of_a_search_on_a_busy_machine(
    report: autofit.Report, workload: autofit.Workload
) -> None:
    best = report.record.recommended
    faster = replace(best, measurement=replace(best.measurement, step_times_s=[1e-9] * 5))
    trials = tuple(faster if each == best else each for each in report.record.trials)
    searched = replace(report.record.search, busy="load 7.0 on 2 cores")
    record = replace(report.record, trials=trials, search=searched)
    endured = autofit.soak(workload, plan=replace(report, record=record), steps=8)
    assert endured.busy == "load 7.0 on 2 cores"
    assert "busy before" in str(endured)
    assert any("median step" in line for line in compare(faster.measurement, endured.measurement))
    assert not any("step" in line for line in endured.deviations)


SCATTER = [0.88, 0.91, 0.95, 0.99, 1.0, 1.01, 1.05, 1.1, 1.15]
"""Steps that scatter by a tenth: medians 8 % apart are nothing, 40 % apart are."""


@pytest.mark.parametrize(
    ("quarters", "said"),
    [
        ((1.0, 1.08, 1.08, 1.08), []),
        (
            (1.0, 1.0, 1.4, 1.4),
            ["steps slowed down from 100 ms to 140 ms"],
        ),
        ((1.4, 1.4, 1.4, 1.4), ["the median step took 140 ms"]),
    ],
)
def test_noise_is_no_slowdown(quarters: tuple[float, ...], said: list[str]) -> None:
    told = replace(TOLD, step_times_s=[0.1 * factor for factor in SCATTER], loss=None)
    steps = [0.1 * level * factor for level in quarters for factor in SCATTER]
    lines = compare(told, replace(told, step_times_s=steps))
    assert [line[: len(words)] for line, words in zip(lines, said, strict=True)] == said


@pytest.mark.parametrize(
    ("risen_by", "said"), [((), None), ((1.5,), "the loss rose from 1.8 to 3.5")]
)
def test_noise_is_no_higher_loss(risen_by: tuple[float, ...], said: str | None) -> None:
    """The report's one loss happened to be low among losses that scatter by a tenth."""
    scatter = [2.0, 2.2, 1.9, 2.1, 1.8, 2.15, 2.05, 1.95]
    losses = [loss + more for more in (0.0, *risen_by) for loss in scatter]
    lines = compare(replace(TOLD, loss=1.8), replace(SEEN, losses=losses, loss=losses[-1]))
    assert [line[: len(said or "")] for line in lines] == [said] * (said is not None)
