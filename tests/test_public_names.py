"""The names that `autofit` offers, and the signatures that its users write against."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest
import torch

import autofit


@pytest.mark.parametrize("name", autofit.__all__)
def test_every_public_name_is_there_and_explains_itself(name: str) -> None:
    found = getattr(autofit, name)
    assert callable(found)
    assert (inspect.getdoc(found) or "").strip()
    assert name in dir(autofit)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        autofit.serach  # noqa: B018  # looking it up is what is tested


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert autofit.__version__ == project["project"]["version"]


def test_a_search_takes_what_the_contract_says() -> None:
    parameters = inspect.signature(autofit.search).parameters
    assert {name: p.default for name, p in parameters.items() if name != "model"} == {
        "sample_batch": None,
        "loss_fn": None,
        "criterion": None,
        "loss_weight": None,
        "optimizer": torch.optim.AdamW,
        "before_step": None,
        "clip_grad_norm": None,
        "train_step": None,
        "global_batch": None,
        "allow_resplit": False,
        "vram_budget": None,
        "device": None,
        "strategies": None,
        "numerics": "reduced_precision",
        "max_micro_batch": None,
        "max_probes": None,
        "timeout": None,
        "study": None,
        "sampler": None,
        "seed": 0,
        "isolation": "process",
        "progress": None,
    }
    positional = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert positional == ["model", "sample_batch"]


def test_what_is_trained_is_said_in_the_same_words_to_a_search_and_to_a_workload() -> None:
    search = inspect.signature(autofit.search).parameters
    workload = inspect.signature(autofit.Workload).parameters
    assert set(workload) <= set(search)
    shared = set(workload) - {"sample_batch"}  # a search of a Workload has none
    assert {name: workload[name].default for name in shared} == {
        name: search[name].default for name in shared
    }


def test_apply_and_probe_take_what_the_contract_says() -> None:
    assert list(inspect.signature(autofit.Report.apply).parameters)[1:8] == [
        "model",
        "optimizer",
        "loss_fn",
        "criterion",
        "loss_weight",
        "before_step",
        "train_step",
    ]
    assert list(inspect.signature(autofit.probe).parameters)[:2] == ["workload", "plan"]
