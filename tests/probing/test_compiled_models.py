"""Models that their users compiled: said early, and not compiled once more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.probing.prober import Target, open_prober
from autofit.probing.survey import Survey
from autofit.registry import load_strategies
from autofit.training.workload import Workload

pytestmark = pytest.mark.slow


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def wrapped() -> nn.Module:
    return torch.compile(plain(), backend="eager")  # type: ignore[return-value]  # a module of it


def in_place() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    return model


def surveyed(workload: Workload) -> tuple[Survey, list[str]]:
    stages: list[str] = []
    strategies = load_strategies(["compile", "checkpointing"])
    with open_prober(workload, strategies, Target("cpu"), on_stage=stages.append) as prober:
        return prober.survey(), stages


@pytest.mark.parametrize("build", [wrapped, in_place])
def test_a_compiled_model_is_said_and_not_compiled_again(build: object) -> None:
    survey, stages = surveyed(Workload(build, torch.randn(4, 8)))  # type: ignore[arg-type]
    assert any("already compiled" in stage for stage in stages[:4]), stages
    assert sum("already compiled" in note for note in survey.notes) == 1
    assert (
        "compile.mode" not in survey.dimensions
        or len(survey.dimensions["compile.mode"].values) == 1
    )
    assert all(len(note.splitlines()) == 1 for note in survey.notes), survey.notes


def test_a_live_model_compiled_in_place_is_said_to_be_measured_plain() -> None:
    survey, _ = surveyed(Workload(in_place(), torch.randn(4, 8)))
    assert any("model.compile() had no effect" in note for note in survey.notes)
    assert not any("already compiled" in note for note in survey.notes)
