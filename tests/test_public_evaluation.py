"""`eval_step=` and `eval_batch=` as a user gives them: evaluations beside a training on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autofit
from autofit.cli.main import app
from autofit.errors import InvalidArgument
from autofit.plan import NoFeasiblePlan
from autofit.units import MIB

HERE: dict[str, Any] = {"device": "cpu", "vram_budget": "64MiB", "strategies": []}
WIDTH = 512
FLOATS = 4


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))


def evaluated(model: nn.Module, batch: Any) -> torch.Tensor:
    assert not model.training
    assert not torch.is_grad_enabled()
    return model(batch[0])


def workload(step: Any = evaluated, batch: Any = 4096) -> autofit.Workload:
    samples = torch.randn(8, 8), torch.arange(8) % 4
    loss = nn.CrossEntropyLoss()
    return autofit.Workload(build, samples, criterion=loss, eval_step=step, eval_batch=batch)


def test_a_probe_says_what_an_evaluation_holds_beside_the_training() -> None:
    ample = HERE | {"vram_budget": "256MiB"}
    few, many = (autofit.probe(workload(batch=n), **ample) for n in (8192, 16384))
    assert few.measurement.held_bytes == many.measurement.held_bytes
    held: Any = few.measurement.evaluation_peak_bytes, many.measurement.evaluation_peak_bytes
    activations = 2 * 8192 * WIDTH * FLOATS
    assert held[0] == pytest.approx(activations, rel=0.2)
    assert held[1] - held[0] == pytest.approx(activations, rel=0.2)
    assert "an evaluation held" in str(few)


def test_a_plan_beside_which_the_evaluation_has_no_room_does_not_fit() -> None:
    trial = autofit.probe(workload(batch=20480), **HERE)
    assert trial.measurement.outcome is autofit.Outcome.OOM
    assert trial.measurement.is_of_evaluation
    assert "in an evaluation of 20480 samples" in str(trial)
    with pytest.raises(NoFeasiblePlan, match=r"in its evaluation.*eval_batch=") as raised:
        autofit.search(workload(batch=20480), max_probes=3, global_batch=None, **HERE)
    assert (raised.value.required_bytes or 0) > 64 * MIB


def test_a_search_finds_the_largest_evaluation_that_has_room() -> None:
    report = autofit.search(workload(), max_probes=2, **HERE)
    found = report.record.findings["evaluation"]
    assert found["samples"] == 4096
    assert found["is_bound"]
    assert 0.8 * 64 * MIB < found["largest_held_bytes"] <= 64 * MIB
    assert f"one of {found['largest_samples']} has room" in " ".join(str(report).split())
    assert autofit.probe(workload(batch=found["largest_samples"]), **HERE).ok


class Unfrozen:
    def __call__(self, model: nn.Module, batch: Any) -> None:
        model[0].requires_grad_(requires_grad=not model[0].weight.requires_grad)  # type: ignore[index]


def trains(model: nn.Module, batch: Any) -> None:
    model.train()
    model(batch[0])
    model.eval()


def half_in_training(model: nn.Module, batch: Any) -> None:
    model[0].train()  # type: ignore[index]


def updates(model: nn.Module, batch: Any) -> None:
    next(model.parameters()).mul_(2.0)


@pytest.mark.slow
def test_an_evaluation_may_end_in_training_mode_but_not_change_the_model() -> None:
    def restores(model: nn.Module, batch: Any) -> None:
        model(batch[0])
        model.train()

    assert autofit.probe(workload(restores), **HERE).ok
    for step, words in (
        (trains, "values of '1.running_mean'"),
        (updates, "values of '0.weight'"),
        (half_in_training, "mode"),
        (Unfrozen(), "requires_grad of '0.weight'"),
    ):
        with pytest.raises(InvalidArgument, match=f"eval_step changed the {words}"):
            autofit.probe(workload(step), **HERE)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"eval_step": evaluated}, "without eval_batch"),
        ({"eval_batch": 8}, "without eval_step"),
        ({"eval_step": 3, "eval_batch": 8}, "must be a function"),
        ({"eval_step": evaluated, "eval_batch": 0}, "at least 1"),
        ({"eval_step": evaluated, "eval_batch": 1.5}, "whole number"),
    ],
)
def test_half_an_evaluation_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        autofit.Workload(build, torch.randn(4, 8), **given)


def test_a_prediction_and_a_check_count_the_evaluation() -> None:
    own = torch.randn(8192, 8), torch.arange(8192) % 4
    predicted: Any = (
        autofit.predict(each, gpu="L4")
        for each in (
            replace(workload(), eval_step=None, eval_batch=None),
            workload(batch=own),
            workload(batch=16384),
        )
    )
    plain, small, large = predicted
    assert plain.evaluation_bytes is None
    assert large.peak_reserved_bytes == plain.peak_reserved_bytes
    assert large.required_bytes == large.evaluation_bytes > plain.required_bytes
    more = large.evaluation_bytes - small.evaluation_bytes
    assert more == pytest.approx(2 * 8192 * WIDTH * FLOATS, rel=0.2)
    verdict = autofit.check(workload(batch=8_000_000), gpu="L4")
    assert verdict.fits is False
    assert "in an evaluation" in str(verdict)
    on_cpu = autofit.check(workload(), device="cpu", vram_budget="64MiB", strategies=[])
    assert on_cpu.required_bytes == on_cpu.evaluation_bytes
    assert on_cpu.fits


def test_the_commands_take_another_size_of_the_evaluation(tmp_path: Path) -> None:
    target = tmp_path / "target_with_evaluation.py"
    target.write_text(
        "import torch\nfrom torch import nn\nimport autofit\n"
        "def step(model, batch):\n    model(batch)\n"
        "def make():\n    return autofit.Workload(lambda: nn.Linear(64, 4096), "
        "torch.randn(8, 64), eval_step=step, eval_batch=8)\n"
        "def plain():\n    return autofit.Workload(lambda: nn.Linear(64, 4096), "
        "torch.randn(8, 64))\n"
    )
    asked = ["check", f"{target}:make", "--gpu", "L4", "--allow-stand-in-loss"]
    assert CliRunner().invoke(app, asked).exit_code == 0
    more = CliRunner().invoke(app, [*asked, "--eval-batch", "4000000"])
    assert more.exit_code == 1
    assert "in an evaluation" in more.stdout
    lacks = CliRunner().invoke(app, ["predict", f"{target}:plain", "--eval-batch", "4"])
    assert isinstance(lacks.exception, InvalidArgument) or lacks.exit_code == 2
