"""Text of a file that may be anybody's: what may become code, and what may reach a terminal.

A report is data, from a colleague or a CI job. Strategies write code from settings and payloads, so
these must be words that mean nothing else in Python. All other text is only shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from autofit.errors import InvalidRequest

_WORD = re.compile(r"[\w.+-]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but newlines and tabs
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula (OWASP, CSV Injection)."""


def check_plain(report: Mapping[str, Any]) -> None:
    """Refuse a report in which a name or value that strategies write into code is no word.

    Raises:
        InvalidRequest: one is not made of letters, digits, "_", ".", "+" and "-" alone.
    """
    for text in _written_into_code(report):
        if not _WORD.fullmatch(text):
            raise InvalidRequest(
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


def _shown(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _written_into_code(report: Mapping[str, Any]) -> Iterator[str]:
    for name, dimension in report["dimensions"].items():
        yield name
        for value in (*dimension["values"], *dimension.get("payloads", ())):
            yield from _bare(value)
    for trial in report["trials"]:
        yield from _bare(trial["plan"]["settings"])


def _bare(value: Any) -> Iterator[str]:
    """Yield the texts of a value but for those in lists, such as names of modules.

    A list is written as Python writes it, with its texts in quotes.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from _bare(each)
