"""The shape of JSON data: what was read from a file is checked before it is used.

A shape is a `Leaf`; [shape], a list of such; {"key": shape, "may_be_missing?": shape}, an object
that may have further keys; or `Table` and `Maybe`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from autofit.errors import InvalidRequest

_LARGEST = 2**63


@dataclass(frozen=True)
class Leaf:
    """A single value: what it is in words, and whether a value is one."""

    words: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Table:
    """An object with any keys, whose values have one shape."""

    shape: Shape


@dataclass(frozen=True)
class Maybe:
    """A value of a shape, or null."""

    shape: Shape


Shape: TypeAlias = Leaf | Table | Maybe | list[Any] | dict[str, Any]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) < _LARGEST


TEXT = Leaf("a text", lambda value: isinstance(value, str))
FLAG = Leaf("true or false", lambda value: isinstance(value, bool))
AMOUNT = Leaf("a whole number from 0", lambda value: _is_whole(value) and 0 <= value < _LARGEST)
COUNT = Leaf("a whole number from 1", lambda value: _is_whole(value) and 0 < value < _LARGEST)
NUMBER = Leaf("a number", _is_number)
DURATION = Leaf("a duration above zero", lambda v: _is_number(v) and 1e-12 < v < 1e12)
WAIT = Leaf("a duration, or zero", lambda v: _is_number(v) and 0 <= v < 1e12)
SCALAR = Leaf(
    "a number, a text, true or false",
    lambda value: isinstance(value, (str, bool)) or _is_number(value),
)
ANYTHING = Leaf("anything", lambda value: True)


_MOST_CHARACTERS = 2**26
"""Of a file that is read: a report takes about 5,000 a trial."""


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or holds numbers or characters that are none.
    """
    with open(path, encoding="utf-8") as file:
        text = file.read(_MOST_CHARACTERS + 1)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS:,} characters")
    try:
        data = json.loads(text)
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return data


def check_shape(value: Any, shape: Shape, place: str) -> None:
    """Check that a value read from JSON has a shape.

    Args:
        value: what was read.
        shape: see above.
        place: of the value in words, for the message.

    Raises:
        InvalidRequest: it has another; the message names the place.
    """
    if isinstance(shape, Maybe):
        if value is not None:
            check_shape(value, shape.shape, place)
    elif isinstance(shape, list):
        _check_kind(value, list, "a list", place)
        for number, part in enumerate(value):
            check_shape(part, shape[0], f"{place}[{number}]")
    elif isinstance(shape, Table):
        _check_kind(value, dict, "an object", place)
        for name, part in value.items():
            check_shape(part, shape.shape, f"{place}.{name}")
    elif isinstance(shape, dict):
        _check_kind(value, dict, "an object", place)
        for key, part in shape.items():
            name = key.removesuffix("?")
            if name in value:
                check_shape(value[name], part, f"{place}.{name}")
            elif name == key:
                raise InvalidRequest(f"{place} lacks {name!r}")
    elif not (_is_finite(value) and shape.fits(value)):
        raise _wrong(place, shape.words, value)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _check_kind(value: Any, kind: type, words: str, place: str) -> None:
    if not isinstance(value, kind):
        raise _wrong(place, words, value)


def _wrong(place: str, words: str, value: Any) -> InvalidRequest:
    is_huge = _is_whole(value) and abs(value) >= _LARGEST  # repr refuses the hugest
    shown = "a huge number" if is_huge else repr(value)
    return InvalidRequest(f"{place} must be {words}, got {shown[:60]}")
