"""Today's verdict against an earlier one: by how much more does the training need?

The earlier one is what `autofit check --json` printed, or the report of a search. Like is held
against like: required bytes where both were told the same way, peak allocated bytes otherwise.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.errors import InvalidRequest
from autofit.units import format_bytes
from autofit.verdict import Verdict


@dataclass(frozen=True)
class Regression:
    """How today's need compares with an earlier one.

    Attributes:
        quantity: what was compared, in words.
        before_bytes: the earlier figure.
        now_bytes: today's.
        allowed: the most it may grow, as a fraction.
    """

    quantity: str
    before_bytes: int
    now_bytes: int
    allowed: float

    @property
    def growth(self) -> float:
        """By how much it grew, as a fraction; negative where it fell."""
        return self.now_bytes / self.before_bytes - 1

    @property
    def passed(self) -> bool:
        """Whether it grew by no more than is allowed."""
        return self.growth <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.quantity} {self.growth:+.1%} ({format_bytes(self.before_bytes)} to "
            f"{format_bytes(self.now_bytes)}; at most {self.allowed:+.1%} allowed)"
        )


def compare_with(verdict: Verdict, path: str | os.PathLike[str], allowed: float) -> Regression:
    """Hold a verdict against an earlier one.

    Args:
        verdict: today's.
        path: a file that `autofit check --json` or a search wrote.
        allowed: the most that the need may grow, as a fraction.

    Raises:
        InvalidRequest: the file cannot be read, is no earlier verdict, or the two have no figure in
            common.
    """
    try:
        before = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {os.fspath(path)} to compare with: {error}") from error
    if not isinstance(before, dict) or not isinstance(before.get("best", before), dict):
        raise InvalidRequest(
            f"{os.fspath(path)} is neither a report nor what `autofit check --json` prints"
        )
    for quantity, key in _figures(verdict, before):
        now, then = getattr(verdict, key), before_bytes(before, key)
        if now is not None and then:
            return Regression(quantity, then, now, allowed)
    raise InvalidRequest(
        f"{os.fspath(path)} and today's verdict have no figure in common to compare: today's was "
        f"told by {verdict.method} and {'fits' if verdict.fits else 'has no measured need'}"
    )


def before_bytes(before: Mapping[str, Any], key: str) -> int | None:
    """That figure of an earlier verdict, or of the best plan of a report."""
    figures: Mapping[str, int | None] = before.get("best", before)
    reserved = figures.get("peak_reserved_bytes")
    if "best" in before and key == "required_bytes" and reserved is not None:
        return reserved + (figures.get("non_torch_bytes") or 0)
    return figures.get(key)


def read_fraction(text: str) -> float:
    """ "5%" or "0.05" as 0.05.

    Raises:
        InvalidRequest: it is neither, or a number from 1 that may as well mean percent.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise InvalidRequest(f"cannot read {text!r} as a fraction: write it like 5% or 0.05")
    number, percent = float(match[1]), bool(match[2])
    if number >= 1 and not percent:
        raise InvalidRequest(
            f"{match[1]} may mean {match[1]}% or {100 * number:g}%: write which of them"
        )
    return number / (100 if percent else 1)


def _figures(verdict: Verdict, before: Mapping[str, Any]) -> list[tuple[str, str]]:
    told_by = "probe" if "best" in before else before.get("method")
    required = [("required bytes", "required_bytes")] if told_by == verdict.method else []
    return [*required, ("peak allocated bytes", "peak_allocated_bytes")]
