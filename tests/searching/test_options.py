"""What a search is given: its options, and studies, which are named without their passwords."""

from __future__ import annotations

import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.samplers import RandomSampler
from torch import nn

import autofit
from autofit.errors import InvalidArgument, StudyError
from autofit.registry import Unnamed, load_strategies
from autofit.searching.options import SearchArguments, SearchOptions
from autofit.searching.storage import name_of
from autofit.training.workload import Workload
from tests.plugin import Plugin

GOOD: dict[str, Any] = {
    "effort": "thorough",
    "sampler": RandomSampler(),
    "max_micro_batch": 8,
    "even_split": True,
    "allow_accumulation_change": True,
    "ranks": 2,
    "profile": Path("trace.json"),
}


def test_valid_options_pass() -> None:
    options = SearchOptions(**GOOD)
    assert {name: getattr(options, name) for name in GOOD} == GOOD
    assert SearchOptions().effort == "normal"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("effort", "hasty"),
        ("effort", None),
        ("sampler", "tpe"),
        ("sampler", RandomSampler),
        ("max_micro_batch", 0),
        ("max_micro_batch", "3"),
        ("even_split", 1),
        ("allow_accumulation_change", "no"),
        ("ranks", 0),
        ("workers", 1.5),
        ("workers", 0),
        ("workers", 2),  # of no executor
        ("executor", 3),
        ("executor", ProcessPoolExecutor),
        ("profile", 3),
        ("profile", "trace.txt"),
        ("profile", "a\0.json"),
        ("profile", "/no/such/folder/trace.json"),
    ],
)
def test_an_invalid_option_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        SearchOptions(**GOOD | {name: value})


def test_several_workers_ask_for_an_executor() -> None:
    with pytest.raises(InvalidArgument, match="executor="):
        SearchOptions(workers=2)


# -- A study's password is nobody's business: not the terminal's, a log's, or an exception's

SECRET = "S3cret-PW"
URLS = [
    f"postgresql+psycopg://alice:{SECRET}@127.0.0.1:9/studies",
    f"postgresql+gone://alice:{SECRET}@127.0.0.1/studies",
    f"nosuch://alice:{SECRET}@127.0.0.1/studies",
    f"mysql://alice:{SECRET}@127.0.0.1/studies",
    f"postgresql+psycopg://alice:{SECRET}@127.0.0.1:port/studies",
    f"postgresql+psycopg://127.0.0.1:9/studies?user=alice&password={SECRET}",
    f"postgresql+psycopg//:alice:{SECRET}@127.0.0.1://x",
    f"postgresql:/alice:{SECRET}@127.0.0.1/studies",
    f"postgresql+psycopg://alice:an@{SECRET}@127.0.0.1:9/studies",
    f"postgresql+psycopg://alice:an@d/{SECRET}@127.0.0.1:9/studies",
    f"mssql+pyodbc://127.0.0.1/studies?odbc_connect=DRIVER%3Dx%3BPWD%3D{SECRET}",
]
SPLIT = [  # nothing after the first mark can be told from a secret
    f"postgresql://127.0.0.1/studies?password=an@{SECRET}",
    f"postgresql://alice:a?@{SECRET}@127.0.0.1/studies",
]


class Untouched(nn.Module):
    """It would take its time, if it were looked at before the study is opened."""

    def __init__(self) -> None:
        raise AssertionError("the model was built before the study was opened")


@pytest.mark.parametrize("url", URLS + SPLIT)
def test_a_study_that_cannot_be_opened_is_refused_early_and_without_its_password(url: str) -> None:
    workload = Workload(Untouched, torch.randn(4, 8))
    with pytest.raises(StudyError) as refused:
        autofit.search(workload, device="cpu", vram_budget="64MiB", study=url, progress=False)
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("url", URLS)
def test_a_study_is_named_without_its_password(url: str) -> None:
    assert SECRET not in name_of(url)
    assert "127.0.0.1" in name_of(url)


@pytest.mark.parametrize("url", SPLIT)
def test_where_a_secret_may_end_anywhere_its_driver_alone_is_named(url: str) -> None:
    assert name_of(url) == "postgresql:***"


@pytest.mark.parametrize("path", ["a@b/search.log", "C:/search?.log", "sqlite:///search.db"])
def test_what_has_no_secret_is_named_in_full(path: str) -> None:
    assert name_of(path) == path


@pytest.mark.parametrize(
    "kind", [list, iter, lambda names: (name for name in names), dict.fromkeys]
)
def test_strategies_of_any_iterable_are_named_however_often_they_are_read(kind: Any) -> None:
    asked = SearchArguments(strategies=kind(["compile", Plugin()]))
    assert asked.named == {"compile", "plugin"}
    assert {one.name for one in load_strategies(asked.strategies)} == {"compile", "plugin"}
    assert asked.named == {"compile", "plugin"}


@pytest.mark.parametrize("given", [None, "precision", Unnamed()])
def test_other_strategies_are_kept_as_they_are(given: Any) -> None:
    assert SearchArguments(strategies=given).strategies is given
