"""Values as JSON, and as text for people."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from autofit.codec import Amount, Count, Duration, Number, from_json, read_json, to_json
from autofit.errors import InvalidArgument
from autofit.plan import Plan, Scalar
from autofit.units import (
    counted,
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    quoted,
    rounded,
)


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
    assert read == Outer([Inner(3, 0.5), Inner(1)], {"a": 2}, {"x": True, "y": 1})
    assert read.settings["x"] is True


def test_a_pipe_in_a_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="pipe"):
        read_json(tmp_path / "pipe")


def test_a_pipe_that_this_process_has_is_read() -> None:
    read, write = os.pipe()
    os.write(write, b'{"a": 1}')
    os.close(write)
    assert read_json(f"/dev/fd/{read}") == {"a": 1}
    os.close(read)


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


def test_texts_and_numbers_of_other_classes_are_written_as_such() -> None:
    given = [torch.__version__, np.float64(0.5), "a \ud800"]
    assert to_json(given) == [str(torch.__version__), 0.5, "a \ud800"]


def test_what_has_no_json_is_not_written() -> None:
    with pytest.raises(TypeError, match="object"):
        to_json({"a": object()})


@pytest.mark.parametrize("text", ["{", '{"a": NaN}', '"\\ud800"', "[" * 10**5])
def test_files_that_are_no_json_are_refused(text: str, tmp_path: Any) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r".+"):
        read_json(tmp_path / "a.json")


def test_a_file_that_gives_a_name_twice_is_refused_with_both_values(tmp_path: Any) -> None:
    (tmp_path / "a.json").write_text('{"plan": {"settings": {"a.b": 1, "c.d": 2, "a.b": "x"}}}')
    with pytest.raises(InvalidArgument, match=r"a\.json.*'a\.b' more than once: 1, 'x'"):
        read_json(tmp_path / "a.json")


# -- Sizes are read as people write them, and numbers become text that keeps three digits


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24G", 24 * 2**30),
        ("1.5 m", 3 * 2**19),
        (" 512 mib ", 512 * 2**20),
        ("1.5 TiB", 3 * 2**39),
        ("80GB", 80 * 10**9),
        (".5kB", 500),
        ("1000000", 1_000_000),
        ("7 b", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (text, rf"{text!r}.*24GiB")
            for text in ("24X", "", "GiB", "-1GiB", "1e9", "24 GiBs", "1,5GiB", "nan")
        ),
        *((text, repr(text)) for text in ("0", "0GiB", "0.4")),
        (f"{'9' * 30}GiB", "no device has as much memory as '9999"),
    ],
)
def test_what_is_no_size_is_refused_with_the_text_and_an_example(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (168.34, 0.0, "168"),
        (168.34, 0.004, "168"),
        (168.34, 4.9, "168"),
        (168.34, 12.0, "170"),
        (1234.5, 60.0, "1230"),
        (2.113, 0.02, "2.11"),
        (2.113, 0.2, "2.1"),
        (80.0, 1.6, "80"),
        (0.052, 0.3, "0.1"),
    ],
)
def test_no_digit_is_shown_that_the_spread_hides(value: float, spread: float, text: str) -> None:
    assert rounded(value, spread) == text
    assert format_rate(value, spread) == f"{text} samples/s"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (format_bytes(None), "?"),
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(1536 * 2**20), "1.50 GiB"),
        (format_bytes(2**20), "1.00 MiB"),
        (format_bytes(100 * 2**30), "100 GiB"),
        (format_bytes(-3 * 2**30), "-3.00 GiB"),
        (format_bytes(12.34 * 2**40), "12.3 TiB"),
        (format_seconds(None), "?"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(1.0), "1.00 s"),
        (format_seconds(95), "1 min 35 s"),
        (format_seconds(59.96), "1 min 0 s"),
        (format_seconds(3600), "1 h 0 min"),
        (format_seconds(2.5e-6), "2.50 us"),
        (format_seconds(3e-9), "3e-09 s"),
        # rounded in the unit that it is shown in
        (format_seconds(0.2134, 0.03), "210 ms"),
        (format_seconds(1.5, 0.3), "1.5 s"),
        (format_rate(None), "?"),
        (format_rate(1234.5), "1234 samples/s"),
        (format_rate(0.52), "0.52 samples/s"),
        (format_rate(43.21), "43.2 samples/s"),
        # as many of a unit as the next one holds are shown in the next one
        (format_bytes(2**30 - 1), "1.00 GiB"),
        (format_bytes(1023 * 2**20), "1023 MiB"),
        (format_seconds(59.97), "1 min 0 s"),
        (format_seconds(59.9), "59.9 s"),
        (format_seconds(0.9999), "1.00 s"),
        (format_rate(0.004), "0.0040 samples/s"),
        (quoted(["1", ""]), "'1', the model itself"),
        (quoted(map(str, range(5))), "'0', '1', '2' and 2 more"),
        (counted(2, "process"), "2 processes"),
        (counted(2, "entry"), "2 entries"),
        (counted(2, "day"), "2 days"),
        (counted(1, "process"), "1 process"),
    ],
)
def test_figures_as_text(shown: str, text: str) -> None:
    assert shown == text
