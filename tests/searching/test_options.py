"""`SearchOptions`: each value is checked as the options are made, and named where it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import RandomSampler

from autofit.errors import InvalidArgument
from autofit.searching.options import SearchOptions

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
        ("executor", 3),
        ("profile", 3),
        ("profile", "trace.txt"),
        ("profile", "a\0.json"),
        ("profile", "/no/such/folder/trace.json"),
    ],
)
def test_an_invalid_option_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        SearchOptions(**GOOD | {name: value})
