"""`autofit predict` and `autofit check` as a CI job calls them."""

from __future__ import annotations

import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import autofit
from autofit.cli.options import load_target
from tests.command_line import run_here

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

def without_a_loss():
    return Workload(nn.Linear(8, 8), torch.randn(4, 8))

def branching():
    return Workload(Branching, torch.randn(4, 8), loss_fn=lambda model, x: model(x).square().mean())
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("target") / "workload_of_capacity_commands.py"
    path.write_text(WORKLOAD)
    return f"{path}:make"


run = functools.cache(run_here)
"""Commands that are the same are run once for all tests."""


def test_check_says_no_and_what_would_fit_and_writes_junit_and_the_summary_of_the_job(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junit, page = tmp_path / "junit.xml", tmp_path / "page.md"
    page.write_text("# before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    ran = run("check", target, "--gpu", "L4", "--micro-batch", "4000000", "--junit-xml", str(junit))
    assert ran.code == 1
    assert re.search(r"(?s)does not fit.*22\.0 GiB.*L4.*largest micro-batch", ran.out)
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    assert "activations" in (suite.findtext("testcase/failure") or "")
    assert re.search(r"does not fit.*22\.0 GiB.*L4", suite.findtext("testcase/system-out") or "")
    assert re.match(
        r"(?s)# before\n### autofit check.*does not fit.*22\.0 GiB.*L4.*\| required \|",
        page.read_text(),
    )


def test_what_predict_and_check_tell_has_the_same_names(target: str) -> None:
    predicted = run("predict", target, "--gpu", "L4").out
    checked = autofit.check(load_target(target), gpu="L4").explain()
    for name in ("required", "VRAM budget", "optimizer state", "non-torch", "activations"):
        assert re.search(rf"(?m)^ +{name} +[\d.]+ \wiB", predicted), name
        assert re.search(rf"(?m)^ +{name} +[\d.]+ \wiB", checked), name


slow = pytest.mark.slow
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
SIZED = r"(?s)\A(?!.*no gpu given).*24\.0 GiB"


@pytest.mark.parametrize(
    ("name", "words", "code", "out", "err"),
    [
        ("make", "predict --gpu L4 --global-batch 32", 0, "32, the whole global batch on L4", ""),
        ("make", "predict --gpu L4", 0, r"(?s)\A(?!.*whole).*largest micro-batch", ""),
        ("make", "predict --gpu L4", 0, r"\A16 x 1 fits on L4: needs up to .* of 22", ""),
        ("make", "predict --gpu L4 --json", 0, r'"fits": true', ""),
        (
            "make",
            "predict --gpu L4 --micro-batch 4000000",
            1,
            r"\A4000000 x 1 does not fit on L4: needs up to [\d.]+ .iB of 22\.0 GiB\n",
            "",
        ),
        ("make", "check --gpu L4 --max-regression 5%", 2, r"\A\Z", "--baseline"),
        pytest.param("make", "check", 2, r"\A\Z", "nothing to check against", marks=no_gpu),
        ("without_a_loss", "check --gpu L4", 5, "loss", ""),
        ("without_a_loss", "check --gpu L4 --allow-stand-in-loss", 0, "", ""),
        # several GPUs make a table
        ("branching", "predict --gpu L4,T4", 5, "", r"\.item\(\)"),
        ("broken", "predict --gpu L4,T4", 3, "", "no "),
        pytest.param(
            "make", "predict --gpu L4,T4", 0, r"T4 .* yes (?s:.*)L4 .* yes ", "", marks=slow
        ),
        pytest.param(
            "make", "predict --gpu L4 --gpu T4 --json", 0, '(?s)"T4".*"L4"', "", marks=slow
        ),
        # a GPU that nobody named is said to be assumed
        *(
            pytest.param("make", f"{command} {more}".strip(), 0, out, "", marks=slow)
            for command in ("check --vram-budget 24GiB", "predict")
            for more, out in (
                ("", "H200.*assumed: no gpu given"),
                ("--json", '"gpu_assumed": true'),
            )
        ),
        *(
            pytest.param("make", f"{command} --gpu 24GiB", 0, SIZED, "", marks=slow)
            for command in ("check", "predict")
        ),
    ],
)
def test_a_command_answers_and_exits_with_its_code(
    target: str, name: str, words: str, code: int, out: str, err: str
) -> None:
    command, *options = words.split()
    ran = run(command, target.replace(":make", f":{name}"), *options)
    assert ran.code == code, ran.err
    assert re.search(out, ran.out)
    assert re.search(err, ran.err)


@pytest.mark.parametrize("command", ["predict", "check"])
def test_ignored_options_are_in_the_result_once(
    target: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "max_split_size_mb")
        ran = run_here(command, target, "--gpu", "L4")
    assert ran.code == 0
    assert ran.out.count("max_split_size_mb:32") == 1


@pytest.mark.parametrize(
    ("name", "code", "words", "message"),
    [
        ("branching", 5, "could not be told", r".*\.item\(\).*"),
        ("broken", 3, "", r"ValueError: no \? loss"),
    ],
)
def test_an_answer_that_there_is_none_of_is_an_error_in_the_junit_file(
    target: str, tmp_path: Path, name: str, code: int, words: str, message: str
) -> None:
    junit = tmp_path / "junit.xml"
    broken = target.replace(":make", f":{name}")
    ran = run("check", broken, "--gpu", "L4", "--junit-xml", str(junit))
    assert ran.code == code
    assert words in ran.out
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
    error: Any = suite.find("testcase/error")
    assert re.fullmatch(message, error.get("message"))
    assert name == "branching" or "loss_fn" in error.text


def test_check_fails_where_the_need_grew(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, junit, page = (tmp_path / name for name in ("earlier.json", "junit.xml", "page.md"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    check = ("check", target, "--gpu", "L4", "--micro-batch")
    earlier.write_text(run(*check, "1000", "--json").out)
    grown = (*check, "100000", "--baseline", str(earlier))
    ran = run(*grown, "--junit-xml", str(junit))
    assert ran.code == 1
    assert re.search(r"(?s)required bytes \+.*1000 x 1.*100000 x 1", ran.out)
    failure: Any = ElementTree.parse(junit).find("testcase/failure")
    assert "required bytes +" in failure.get("message", "")
    assert "fits, and needs more than before" in page.read_text()
    allowed = run(*grown, "--max-regression", "100000%", "--json")
    assert allowed.code == 0
    assert allowed.json["regression"]["growth"] > 0.05
    assert allowed.json["regression"]["passed"]


@pytest.fixture(scope="module")
def report(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short search on the CPU device."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    searched = ("search", target, "--device", "cpu", "--vram-budget", "512MiB")
    ran = run(*searched, "--max-probes", "1", "--strategies", "precision", "--out", str(path))
    assert ran.code == 0, ran.err
    return path


@pytest.mark.slow
def test_check_of_a_plan_that_was_tuned_on_the_cpu(target: str, report: Path) -> None:
    """Its budget leaves out a GPU's context: held against a prediction it would tell nothing."""
    made = json.loads(report.read_text())
    of_report = ("check", target, "--plan-from", str(report), "--json")
    probed = run(*of_report)
    assert (probed.code, probed.json["method"]) == (0, "probe")
    assert probed.json["vram_budget_bytes"] == made["vram_budget_bytes"]
    refused = run(*of_report, "--gpu", "L4")
    assert refused.code == 2
    assert "CPU" in refused.err
    predicted = run(*of_report, "--gpu", "L4", "--vram-budget", "20GiB")
    assert (predicted.code, predicted.json["method"]) == (0, "predict")
    assert predicted.json["plan"]["micro_batch"] == made["best"]["plan"]["micro_batch"]


@pytest.mark.slow
def test_check_of_a_tuned_plan_probes_where_it_can(
    target: str, report: Path, tmp_path: Path
) -> None:
    """The GPU that the report was made on is for a prediction alone, and what it taught too."""
    made, of_gpu = json.loads(report.read_text()), tmp_path / "report.json"
    made["environment"] |= {"gpu": "NVIDIA L4", "device": "cuda"}
    of_gpu.write_text(json.dumps(made))
    of_report = ("check", target, "--plan-from", str(of_gpu), "--json")
    probed = run(*of_report, "--device", "cpu")
    assert (probed.code, probed.json["method"]) == (0, "probe")
    assert probed.json["vram_budget_bytes"] == made["vram_budget_bytes"]
    named = run_here(*of_report).json
    assert named == run(*of_report, "--gpu", "L4").json
    assert named["method"] == "predict"
    learned = {"non_torch_bytes": named["breakdown"]["non_torch"] + 2**20}
    of_gpu.write_text(json.dumps(made | {"calibration": learned}))
    assert run_here(*of_report).json["required_bytes"] == named["required_bytes"] + 2**20


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
    other = tmp_path / "another_workload.py"
    other.write_text(WORKLOAD.replace("4096", "2048"))
    command, *more = words.split()
    refused = run(command, f"{other}:make", *more, str(report))
    assert refused.code == 2
    assert re.search(r"another workload: parameters \d+ there, \d+ here", refused.err)
