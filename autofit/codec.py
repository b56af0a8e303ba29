"""Dataclasses as JSON: what was read is of the type that it must be, or is refused in words.

A type says what its JSON looks like: a dataclass is an object whose keys are its fields. Keys that
a type lacks are ignored, so that a file of a later version can be read. Nothing of a file is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from autofit.errors import InvalidArgument

# Bounds also refuse what is not finite: no comparison with nan holds.
_INT64 = 2**63 - 1  # the largest bound that the library takes
Amount: TypeAlias = Annotated[int, Meta(ge=0, lt=_INT64)]
Count: TypeAlias = Annotated[int, Meta(ge=1, lt=_INT64)]
Number: TypeAlias = Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
Duration: TypeAlias = Annotated[float, Meta(gt=1e-12, lt=1e12)]
"""Seconds of what took time."""
Wait: TypeAlias = Annotated[float, Meta(ge=0.0, lt=1e12)]
"""Seconds, or none."""
DeviceName: TypeAlias = Annotated[str, Meta(pattern="^(cpu|cuda)(:.*)?$")]
SettingValue: TypeAlias = bool | Annotated[int, Meta(gt=-_INT64, lt=_INT64)] | Number | str

_Read = TypeVar("_Read")


def to_json(value: Any) -> Any:
    """Return a value, and the dataclasses in it, as the data that JSON has.

    By way of `json`, since `msgspec` writes no lone surrogates, which an error's text may hold.
    """
    return json.loads(json.dumps(msgspec.to_builtins(value, enc_hook=_builtin)))


def _builtin(value: Any) -> Any:
    """Return a text, number, mapping or sequence of a subclass as the builtin one.

    Raises:
        TypeError: it is none.
    """
    for kind in (str, int, float):  # torch's version is such a text, NumPy's float64 a float
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def from_json(data: Any, kind: type[_Read], place: str) -> _Read:
    """Return JSON data as a value of a type.

    Args:
        data: what `to_json` returned, or a file holds.
        kind: a dataclass, or another type of which `msgspec` knows the JSON.
        place: of the data in words, for the message.

    Raises:
        InvalidArgument: they are no such value; the message names the place, as `$.plan.size`.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{place}: {error}") from error
    except (OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{place} holds what is too large: {error}") from error


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
