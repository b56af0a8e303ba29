"""Text of a file that may be anybody's: what may become code, and what may reach a terminal.

A report or a study is data, from a colleague or a CI job. Strategies write code from settings and
payloads, so these must be words that mean nothing else in Python. All other text is only shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from autofit.errors import InvalidArgument
from autofit.plan import DimensionForm

_WORD = re.compile(r"[\w.+-]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""What moves a cursor or turns the direction of writing; not newlines and tabs."""
_COLOR = re.compile(r"(\x1b\[[\d;]*m)")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula (OWASP, CSV Injection)."""


def check_are_words(
    dimensions: Mapping[str, DimensionForm], settings: Iterable[Mapping[str, Any]]
) -> None:
    """Refuse a name or value that strategies write into code and that is no word.

    Args:
        dimensions: setting -> a dimension as JSON has it.
        settings: of plans.

    Raises:
        InvalidArgument: one is not made of letters, digits, "_", ".", "+" and "-" alone.
    """
    values = [(*each.values, *each.payloads) for each in dimensions.values()]
    for text in _bare([*dimensions, *chain(*values), *settings]):
        if not _WORD.fullmatch(text):
            raise InvalidArgument(
                f"{_shown(text)[:80]!r} is no name or value of a setting, which have letters, "
                'digits, "_", ".", "+" and "-" alone'
            )


def without_controls(value: Any) -> Any:
    """Return JSON data whose texts have no control characters: each is shown as its escape."""
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, Mapping):
        return {_shown(name): without_controls(each) for name, each in value.items()}
    return [without_controls(each) for each in value] if isinstance(value, list) else value


def in_a_table(value: Any) -> Any:
    """Return a cell of a table for spreadsheets: a text that looks like a formula is quoted."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def for_terminal(text: str) -> str:
    """Return a text that may move no cursor and set no title, but may have colours."""
    parts = _COLOR.split(text)
    return "".join(part if _COLOR.match(part) else _shown(part) for part in parts)


def _shown(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _bare(values: Iterable[Any]) -> Iterator[str]:
    """Yield the texts among values and in mappings, but not in lists, such as names of modules.

    A list is written as Python writes it, with its texts in quotes.
    """
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _bare(chain(*value.items()))
