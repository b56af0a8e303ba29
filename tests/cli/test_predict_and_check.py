"""`autofit predict` and `autofit check` as a CI job calls them."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

import autofit
from autofit.cli.main import app, main
from autofit.cli.options import load_target
from autofit.errors import InvalidArgument

WORKLOAD = """
import torch
from torch import nn
from autofit import Workload

def make():
    model = lambda: nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512))
    return Workload(model, torch.randn(16, 512), loss_fn=lambda model, x: model(x).square().mean())

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) if x.sum().item() > 0 else self.linear(-x)

def broken():
    def loss_fn(model, batch):
        raise ValueError("no \\x07 loss")
    return Workload(nn.Linear(8, 8), torch.randn(4, 8), loss_fn=loss_fn)

def branching():
    return Workload(Branching, torch.randn(4, 8), loss_fn=lambda model, x: model(x).square().mean())
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("target") / "workload_of_capacity_commands.py"
    path.write_text(WORKLOAD)
    return f"{path}:make"


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.stdout


def test_check_says_no_and_what_would_fit(target: str) -> None:
    code, said = run("check", target, "--gpu", "L4", "--micro-batch", "4000000")
    assert code == 1
    assert "does not fit" in said
    assert "largest micro-batch" in said


def test_what_predict_and_check_tell_has_the_same_names(target: str) -> None:
    predicted = run("predict", target, "--gpu", "L4")[1]
    checked = autofit.check(load_target(target), gpu="L4").explain()
    for name in ("required", "VRAM budget", "optimizer state", "non-torch", "activations"):
        for said in (predicted, checked):
            assert re.search(rf"(?m)^ +{name} +[\d.]+ \wiB", said), (name, said)


def test_a_largest_micro_batch_that_the_global_batch_bounds_is_said_so(target: str) -> None:
    said = run("predict", target, "--gpu", "L4", "--global-batch", "32")[1]
    assert re.search(r"largest micro-batch +32, the whole global batch on L4", said)
    assert "whole" not in run("predict", target, "--gpu", "L4")[1]


def test_predict_says_no_and_exits_with_1(target: str) -> None:
    code, said = run("predict", target, "--gpu", "L4", "--micro-batch", "4000000")
    assert code == 1
    assert re.search(r"VRAM budget +22\.0 GiB.*\n +fits +no", said)
    code, said = run("predict", target, "--gpu", "L4", "--json")
    assert (code, json.loads(said)["fits"]) == (0, True)


@pytest.mark.parametrize(
    "options",
    [["--gpu", "L4", "--max-regression", "5%"], *([[]] * (not torch.cuda.is_available()))],
    ids=str,
)
def test_a_check_without_what_it_compares_with_is_a_usage_error(
    target: str, options: list[str]
) -> None:
    with pytest.raises(InvalidArgument, match=r"--baseline|nothing to check against"):
        CliRunner().invoke(app, ["check", target, *options], catch_exceptions=False)


def test_ignored_options_are_in_the_result_once(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:32")
    for command in ("predict", "check"):
        with warnings.catch_warnings(record=True) as warned:
            code, said = run(command, target, "--gpu", "L4")
        assert code == 0
        assert said.count("max_split_size_mb:32") == 1
        assert not [each for each in warned if "max_split_size_mb" in str(each.message)]


def test_check_cannot_tell_what_depends_on_values(target: str, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    branching = target.replace(":make", ":branching")
    code, said = run("check", branching, "--gpu", "L4", "--junit-xml", str(junit))
    assert code == 5
    assert "could not be told" in said
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")


def test_check_writes_junit_and_the_summary_of_the_job(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junit, page = tmp_path / "junit.xml", tmp_path / "page.md"
    page.write_text("# before\n")
    forms = ["--junit-xml", str(junit)]
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    code, _ = run("check", target, "--gpu", "L4", "--micro-batch", "4000000", *forms)
    assert code == 1
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    failure: Any = suite.find("testcase/failure")
    assert "activations" in (failure.text or "")
    assert re.search(r"does not fit.*22\.0 GiB.*L4", suite.findtext("testcase/system-out") or "")
    assert page.read_text().startswith("# before\n### autofit check")
    assert re.search(r"does not fit.*22\.0 GiB.*L4", page.read_text())
    assert "| required |" in page.read_text()


def test_check_fails_where_the_need_grew(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, junit, page = (tmp_path / name for name in ("earlier.json", "junit.xml", "page.md"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    code, said = run("check", target, "--gpu", "L4", "--micro-batch", "1000", "--json")
    assert code == 0
    earlier.write_text(said)
    grown = ["check", target, "--gpu", "L4", "--micro-batch", "100000", "--baseline", str(earlier)]
    code, said = run(*grown, "--junit-xml", str(junit))
    assert code == 1
    assert "required bytes +" in said
    failure: Any = ElementTree.parse(junit).find("testcase/failure")
    assert "required bytes +" in failure.get("message", "")
    assert "fits, and needs more than before" in page.read_text()
    assert re.search(r"1000 x 1.*100000 x 1", said, re.DOTALL)
    compared = json.loads(run(*grown, "--json")[1])["regression"]
    assert compared["growth"] > 0.05
    assert not compared["passed"]
    assert run(*grown, "--max-regression", "100000%")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [["check", "--vram-budget", "24GiB"], ["predict"]])
def test_a_gpu_that_nobody_named_is_said_to_be_assumed(target: str, command: list[str]) -> None:
    assert re.search("H200.*assumed: no gpu given", run(*command, target)[1])
    assert json.loads(run(*command, target, "--json")[1])["gpu_assumed"] is True
    said = run(*command[:1], target, "--gpu", "24GiB")[1]
    assert "24.0 GiB" in said
    assert "no gpu given" not in said


@pytest.fixture(scope="module")
def report(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short search on the CPU device."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    searched = ["search", target, "--device", "cpu", "--vram-budget", "512MiB"]
    quickly = ["--max-probes", "1", "--strategies", "precision"]
    ran = CliRunner().invoke(app, [*searched, *quickly, "--out", str(path)])
    assert ran.exit_code == 0, (ran.output, ran.exception)
    return path


@pytest.mark.slow
def test_check_of_a_plan_that_was_tuned_on_the_cpu(target: str, report: Path) -> None:
    """Its budget leaves out a GPU's context: held against a prediction it would tell nothing."""
    made = json.loads(report.read_text())
    of_report = ["check", target, "--plan-from", str(report), "--json"]
    code, said = run(*of_report)
    assert (code, json.loads(said)["method"]) == (0, "probe")
    assert json.loads(said)["vram_budget_bytes"] == made["vram_budget_bytes"]
    refused = CliRunner().invoke(app, [*of_report, "--gpu", "L4"]).exception
    assert isinstance(refused, InvalidArgument)
    assert "CPU" in str(refused)
    code, said = run(*of_report, "--gpu", "L4", "--vram-budget", "20GiB")
    assert (code, json.loads(said)["method"]) == (0, "predict")
    assert json.loads(said)["plan"]["micro_batch"] == made["best"]["plan"]["micro_batch"]


@pytest.mark.slow
def test_check_of_a_tuned_plan_probes_where_it_can(
    target: str, report: Path, tmp_path: Path
) -> None:
    """The GPU that the report was made on is for a prediction alone, and what it taught too."""
    made = json.loads(report.read_text())
    made["environment"] |= {"gpu": "NVIDIA L4", "device": "cuda"}
    of_gpu = tmp_path / "report.json"
    of_gpu.write_text(json.dumps(made))
    of_report = ["check", target, "--plan-from", str(of_gpu), "--json"]
    code, said = run(*of_report, "--device", "cpu")
    assert (code, json.loads(said)["method"]) == (0, "probe")
    assert json.loads(said)["vram_budget_bytes"] == made["vram_budget_bytes"]
    named = json.loads(run(*of_report)[1])
    same = json.loads(run(*of_report, "--gpu", "L4")[1])
    assert named == same
    assert named["method"] == "predict"
    learned = {"non_torch_bytes": named["breakdown"]["non_torch"] + 2**20}
    of_gpu.write_text(json.dumps(made | {"calibration": learned}))
    exact = json.loads(run(*of_report)[1])
    assert exact["required_bytes"] == named["required_bytes"] + 2**20


def test_an_error_of_the_users_code_is_in_the_junit_file_too(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junit = tmp_path / "junit.xml"
    broken = target.replace(":make", ":broken")
    command = ["autofit", "check", broken, "--gpu", "L4", "--junit-xml", str(junit)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    suite = ElementTree.parse(junit).getroot()
    error: Any = suite.find("testcase/error")
    assert suite.get("errors") == "1"
    assert error.get("message") == "ValueError: no ? loss"
    assert "loss_fn" in str(error.text)


@pytest.mark.slow
def test_several_gpus_give_a_table(target: str) -> None:
    code, said = run("predict", target, "--gpu", "L4,T4")
    assert code == 0
    assert re.search(r"^T4 .* yes ", said, re.MULTILINE)
    assert re.search(r"^L4 .* yes ", said, re.MULTILINE)
    told = json.loads(run("predict", target, "--gpu", "L4", "--gpu", "T4", "--json")[1])
    assert [row["gpu"] for row in told["gpus"]] == ["T4", "L4"]


def test_a_table_that_cannot_be_predicted_says_why(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code, words in (("branching", 5, ".item()"), ("broken", 3, "no ")):
        monkeypatch.setattr(
            sys,
            "argv",
            ["autofit", "predict", target.replace(":make", f":{name}"), "--gpu", "L4,T4"],
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "check --gpu L4 --vram-budget 20GiB --plan-from",
        "predict --gpu L4,T4 --plan-from",
        "probe --device cpu --plan-from",
    ],
)
def test_a_report_of_another_model_is_refused(words: str, report: Path, tmp_path: Path) -> None:
    """Its plan says nothing of this model: a green check would be of nothing that was tuned."""
    command, *more = words.split()
    other = tmp_path / f"another_workload_{words.count(',')}_{command}.py"
    other.write_text(WORKLOAD.replace("4096", "2048"))
    assert other.read_text() != WORKLOAD
    refused = CliRunner().invoke(app, [command, f"{other}:make", *more, str(report)])
    assert isinstance(refused.exception, InvalidArgument)
    assert re.search(r"another workload: parameters \d+ there, \d+ here", str(refused.exception))


def test_a_check_without_a_loss_exits_with_5(tmp_path: Path) -> None:
    path = tmp_path / "workload_without_a_loss.py"
    path.write_text(
        "import torch, autofit\n"
        "def make():\n"
        "    return autofit.Workload(torch.nn.Linear(8, 8), torch.randn(4, 8))\n"
    )
    asked = ["check", f"{path}:make", "--gpu", "L4"]
    code, said = run(*asked)
    assert code == 5
    assert "loss" in said
    assert run(*asked, "--allow-stand-in-loss")[0] == 0
