"""Dataclasses as JSON: what was read is of the type that it must be, or is refused in words.

A type says what its JSON looks like: a dataclass is an object whose keys are its fields. Keys that
a type lacks are ignored, so that a file of a later version can be read. Nothing of a file is run.

A report or a study may be anybody's: a colleague's or a CI job's. Strategies write code from
settings and payloads, so these must be words that mean nothing else in Python. All other text is
only shown.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
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
DescribedTensor: TypeAlias = Annotated[str, Meta(pattern=r"^\w+\[(\d+(, \d+)*)?\]$")]
"""Type and shape, as float32[8, 16]."""
SettingValue: TypeAlias = bool | Annotated[int, Meta(gt=-_INT64, lt=_INT64)] | Number | str

_Read = TypeVar("_Read")


def to_json(value: Any) -> Any:
    """Return a value, with the dataclasses in it, as JSON data.

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
    raise TypeError(f"a {type(value).__name__} is not JSON")


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


_OWN = re.compile("/dev/(fd/|stdin)|/proc/self/fd/")
"""Descriptors of this process itself, whose other end its user has."""
_MAX_CHARACTERS = 2**26
"""Of a file that is read: a report takes about 5,000 a trial."""


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        InvalidArgument: it cannot be read, is not JSON, holds what JSON has no form for, or gives a
            name twice; or it is a pipe in a folder, for whose writer it would wait for ever.
    """
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode) and not _OWN.match(os.fspath(path)):
            raise OSError(errno.EINVAL, "it is a pipe: give a file, or /dev/stdin")
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"it has more than {_MAX_CHARACTERS:,} characters")
        data = json.loads(text, object_pairs_hook=_with_names_once)
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        if not isinstance(data, dict):
            raise ValueError(f"it holds a {type(data).__name__}")
    except OSError as error:
        raise InvalidArgument(
            f"cannot read {os.fspath(path)}: {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{os.fspath(path)} is not a JSON object: {error}") from error
    return data


def _with_names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse repeated names, of which readers silently take the last.

    Raises:
        ValueError: it gives a name twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        values = ", ".join(f"{value!r:.40}" for name, value in pairs if name == twice)
        raise ValueError(f"it gives {twice!r} more than once: {values}")
    return found


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""What moves a cursor or turns the direction of writing; not newlines and tabs."""
_IN_A_NAME = re.compile(r"[\n\t]")
"""Controls that a text may hold, and a name may not."""
_COMMAND = re.compile(r"(?m)^\s*:(?=:)|#(?=#\w*\[)")
"""What a CI runner takes for a command when it reads a log: `::error::`, `##[error]`, `##vso[`,
`##teamcity[`."""
_COLOR = re.compile(r"(\x1b\[[\d;]*m)")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula (OWASP, CSV Injection)."""


def without_controls(value: Any) -> Any:
    """Return JSON data whose texts have no control characters: each is shown as its escape."""
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, Mapping):
        return {_shown_name(name): without_controls(each) for name, each in value.items()}
    return [without_controls(each) for each in value] if isinstance(value, list) else value


def in_a_table(value: Any) -> Any:
    """Return a cell for spreadsheets: a list as JSON, a text that looks like a formula quoted."""
    if isinstance(value, list):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def for_terminal(text: str) -> str:
    """Return a text that moves no cursor, sets no title and commands no CI runner.

    It may have colours.
    """
    parts = _COLOR.split(without_commands(text))
    return "".join(part if _COLOR.match(part) else _shown(part) for part in parts)


def without_commands(text: str) -> str:
    """Return a text no line of which is a command to a CI runner that reads it in a log."""
    return _COMMAND.sub(r"\g<0>\\", text)


def _shown(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _shown_name(name: str) -> str:
    return _IN_A_NAME.sub(lambda found: repr(found[0])[1:-1], _shown(name))
