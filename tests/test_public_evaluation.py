"""`eval_step=` and `eval_batch=` as a user gives them: evaluations beside a training on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import autofit
from autofit.errors import InvalidArgument
from autofit.plan import NoFeasiblePlan
from autofit.units import MIB
from tests.command_line import run_here

HERE: dict[str, Any] = {"device": "cpu", "vram_budget": "64MiB", "strategies": []}
WIDTH = 512
FLOATS = 4
TARGET = """
import torch
from torch import nn
import autofit

def step(model, batch):
    model(batch)

plain = autofit.Workload(lambda: nn.Linear(64, 4096), torch.randn(8, 64))
made = autofit.Workload(plain.model, plain.sample_batch, eval_step=step, eval_batch=8)
"""


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
        autofit.search(workload(batch=20480), max_probes=3, **HERE)
    assert (raised.value.required_bytes or 0) > 64 * MIB


def trains(model: nn.Module, batch: Any) -> None:
    model.train()
    model(batch[0])
    model.eval()


def half_in_training(model: nn.Module, batch: Any) -> None:
    model[0].train()  # type: ignore[index]


def updates(model: nn.Module, batch: Any) -> None:
    next(model.parameters()).mul_(2.0)


def unfreezes(model: nn.Module, batch: Any) -> None:
    model[0].requires_grad_(requires_grad=not model[0].weight.requires_grad)  # type: ignore[index]


def restores(model: nn.Module, batch: Any) -> None:
    model(batch[0])
    model.train()


@pytest.mark.slow
def test_an_evaluation_may_end_in_training_mode() -> None:
    assert autofit.probe(workload(restores), **HERE).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (trains, "values of '1.running_mean'"),
        (updates, "values of '0.weight'"),
        (half_in_training, "mode"),
        (unfreezes, "requires_grad of '0.weight'"),
    ],
)
def test_an_evaluation_must_not_change_the_model(step: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"eval_step changed the {words}"):
        autofit.probe(workload(step), **HERE)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_model_that_holds_a_quantized_buffer_is_evaluated() -> None:
    def with_table() -> nn.Module:
        model = build()
        table = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
        model.register_buffer("table", table)
        return model

    assert autofit.probe(replace(workload(), model=with_table), **HERE).measurement.ok


def test_a_prediction_counts_the_evaluation() -> None:
    own = torch.randn(8192, 8), torch.arange(8192) % 4
    without = replace(workload(), eval_step=None, eval_batch=None)
    given = without, workload(batch=own), workload(batch=16384)
    plain, small, large = (cast(Any, autofit.predict(each, gpu="L4")) for each in given)
    assert plain.evaluation_bytes is None
    assert large.peak_reserved_bytes == plain.peak_reserved_bytes
    assert large.required_bytes == large.evaluation_bytes > plain.required_bytes
    more = large.evaluation_bytes - small.evaluation_bytes
    assert more == pytest.approx(2 * 8192 * WIDTH * FLOATS, rel=0.2)


def test_a_check_counts_the_evaluation() -> None:
    on_cpu = autofit.check(workload(), device="cpu", vram_budget="64MiB", strategies=[])
    assert on_cpu.required_bytes == on_cpu.evaluation_bytes
    assert on_cpu.fits


def test_a_search_finds_the_largest_evaluation_that_has_room() -> None:
    report = autofit.search(workload(), max_probes=2, **HERE)
    found = report.record.findings["evaluation"]
    assert found["samples"] == 4096
    assert found["is_bound"]
    assert 0.8 * 64 * MIB < found["largest_held_bytes"] <= 64 * MIB
    assert f"one of {found['largest_samples']} has room" in " ".join(str(report).split())
    assert autofit.probe(workload(batch=found["largest_samples"]), **HERE).ok


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


def test_the_commands_take_another_size_of_the_evaluation(tmp_path: Path) -> None:
    target = tmp_path / "target_with_evaluation.py"
    target.write_text(TARGET)
    more = run_here("check", f"{target}:made", "--gpu", "L4", "--eval-batch", "4000000",
                    "--allow-stand-in-loss")  # fmt: skip
    assert more.code == 1
    assert "in an evaluation" in more.out
    assert run_here("predict", f"{target}:plain", "--eval-batch", "4").code == 2
