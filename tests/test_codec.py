"""Dataclasses as JSON: round trips, and refusals that name the place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from autofit.codec import Amount, Count, Duration, Number, from_json, read_json, to_json
from autofit.errors import InvalidArgument
from autofit.plan import Plan, Scalar


@dataclass(frozen=True)
class Inner:
    size: Count
    seconds: Duration | None = None


@dataclass(frozen=True)
class Outer:
    inner: Sequence[Inner]
    by_name: Mapping[str, Amount] = field(default_factory=dict)
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    rate: Number = 0.0


def test_what_is_written_is_read_and_later_keys_are_ignored() -> None:
    given = Outer((Inner(3, 0.5), Inner(1)), MappingProxyType({"a": 2}), {"x": True, "y": 1})
    data = to_json(given)
    assert data == json.loads(json.dumps(data))
    read = from_json(data | {"of a later version": [1]}, Outer, "it")
    assert read.inner == [Inner(3, 0.5), Inner(1)]
    assert read.by_name == {"a": 2}
    assert read.settings == {"x": True, "y": 1}
    assert read.settings["x"] is True


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "it: .*`inner`"),
        ([], "it: Expected `object`"),
        ({"inner": [{"size": 1}, {}]}, r"it: .*`size` .*\$.inner\[1\]"),
        ({"inner": [{"size": 0}]}, r"it: Expected `int` >= 1 .*\$.inner\[0\].size"),
        ({"inner": [{"size": True}]}, r"Expected `int`, got `bool` .*\$.inner\[0\].size"),
        ({"inner": [{"size": 2**64}]}, r"it: .*\$.inner\[0\].size"),
        ({"inner": [{"size": 1, "seconds": 0}]}, r"it: .*\$.inner\[0\].seconds"),
        ({"inner": [], "rate": math.nan}, r"it: .*\$.rate"),
        ({"inner": [], "rate": math.inf}, r"it: .*\$.rate"),
        ({"inner": [], "rate": 10**400}, "it"),
        ({"inner": [], "by_name": {"a": -1}}, r"it: Expected `int` >= 0 .*\$.by_name"),
        ({"inner": [], "settings": {"a": math.nan}}, r"it: .*\$.settings"),
        ({"inner": [], "settings": {"a": []}}, r"it: .*\$.settings"),
        ({"inner": "text"}, r"Expected `array`, got `str` .*\$.inner"),
    ],
)
def test_what_is_no_such_value_is_refused_by_its_place(data: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        from_json(data, Outer, "it")


def test_a_value_that_checks_itself_says_why_and_where() -> None:
    with pytest.raises(InvalidArgument, match=r"^the plan: a global batch of 9 .* not 4"):
        from_json({"micro_batch": 4, "global_batch": 9}, Plan, "the plan")


def test_texts_with_lone_surrogates_are_written() -> None:
    assert to_json({"why": "a \ud800"}) == {"why": "a \ud800"}


def test_texts_and_numbers_of_other_classes_are_written_as_such() -> None:
    assert to_json([torch.__version__, np.float64(0.5)]) == [str(torch.__version__), 0.5]


def test_what_has_no_json_is_not_written() -> None:
    with pytest.raises(TypeError, match="object"):
        to_json({"a": object()})


@pytest.mark.parametrize("text", ["{", '{"a": NaN}', '"\\ud800"', "[" * 10**5])
def test_files_that_are_no_json_are_refused(text: str, tmp_path: Any) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r".+"):
        read_json(tmp_path / "a.json")
