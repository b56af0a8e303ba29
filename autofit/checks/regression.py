"""Today's verdict against an earlier one: by how much more does the training need?

The earlier one is what `autofit check --json` printed, or the report of a search. Like is held
against like: required bytes where both were told the same way, peak allocated bytes otherwise. What
was told for the CPU is not held against what was told for a GPU; another plan or GPU is named.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.checks.verdict import Verdict
from autofit.errors import InvalidRequest
from autofit.plan import Settings
from autofit.prediction.gpus import find_gpu
from autofit.report.record import Record
from autofit.units import format_bytes


@dataclass(frozen=True)
class Regression:
    """How today's need compares with an earlier one.

    Attributes:
        quantity: what was compared, in words.
        before_bytes: the earlier figure.
        now_bytes: today's.
        allowed: the most it may grow, as a fraction.
        differs: what else is not as it was, in words, such as the plan.
    """

    quantity: str
    before_bytes: int
    now_bytes: int
    allowed: float
    differs: tuple[str, ...] = ()

    @property
    def growth(self) -> float:
        """By how much it grew, as a fraction; negative where it fell."""
        return self.now_bytes / self.before_bytes - 1

    @property
    def passed(self) -> bool:
        """Whether it grew by no more than is allowed."""
        return self.growth <= self.allowed

    def __str__(self) -> str:
        differs = f", but not of the same: {'; '.join(self.differs)}" if self.differs else ""
        return (
            f"{self.quantity} {self.growth:+.1%} ({format_bytes(self.before_bytes)} to "
            f"{format_bytes(self.now_bytes)}; at most {self.allowed:+.1%} allowed){differs}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        told = {"growth": self.growth, "passed": self.passed, "differs": list(self.differs)}
        return vars(self) | told


def compare_with(verdict: Verdict, path: str | os.PathLike[str], allowed: float) -> Regression:
    """Hold a verdict against an earlier one.

    Args:
        verdict: today's.
        path: a file that `autofit check --json` or a search wrote.
        allowed: the most that the need may grow, as a fraction.

    Raises:
        InvalidRequest: the file cannot be read, is no earlier verdict, or the two have no figure in
            common: one was told for the CPU and one for a GPU, say.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"cannot read {os.fspath(path)} to compare with: {error}") from error
    try:
        before, plain = _told_before(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{os.fspath(path)} is neither a report nor what `autofit check --json` prints: {error}"
        ) from error
    if verdict.device and before.device and verdict.device != before.device:
        raise InvalidRequest(
            f"{os.fspath(path)} was told for {before.gpu or before.device}, and today's verdict "
            f"for {verdict.gpu or verdict.device}: bytes on the CPU and on a GPU do not compare; "
            "check on the same kind of device as then"
        )
    alike = [("required bytes", "required_bytes")] * (before.method == verdict.method)
    for quantity, name in (*alike, ("peak allocated bytes", "peak_allocated_bytes")):
        now, then = getattr(verdict, name), getattr(before, name)
        if (
            now is not None
            and isinstance(then, int)
            and not isinstance(then, bool)
            and 0 < then < 2**63
        ):
            return Regression(quantity, then, now, allowed, _differences(before, verdict, plain))
    raise InvalidRequest(
        f"{os.fspath(path)} and today's verdict have no figure in common to compare: today's was "
        f"told by {verdict.method} and {'fits' if verdict.fits else 'has no measured need'}"
    )


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


def _told_before(content: Any) -> tuple[Verdict, Settings]:
    """The earlier verdict, that of a report's best plan, and which settings are known as plain."""
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__}")
    if "best" not in content:
        return Verdict.from_dict(content), {}
    record = Record.from_dict(content)
    best = record.trial(record.best_number)
    verdict = Verdict(
        True,
        best.plan,
        "probe",
        record.vram_budget_bytes,
        best.measurement.held_bytes,
        peak_allocated_bytes=best.measurement.peak_allocated_bytes,
        device=record.environment["device"].partition(":")[0],
        gpu=record.environment.get("gpu"),
    )
    return verdict, record.plain_settings


def _differences(before: Verdict, now: Verdict, plain: Settings) -> tuple[str, ...]:
    """What is known to be another than it was; older files do not say all of it."""
    plans = [str(verdict.plan.without(plain)) for verdict in (before, now)]
    gpus = [_known_name(verdict.gpu) for verdict in (before, now)]
    methods = [f"told by {verdict.method}" for verdict in (before, now)]
    return tuple(
        f"{was} then, {become} now"
        for was, become in (plans, gpus, methods)
        if was and become and was != become
    )


def _known_name(gpu: str | None) -> str | None:
    """NVIDIA H200 and H200 are one."""
    try:
        return gpu and find_gpu(gpu).name
    except InvalidRequest:
        return gpu
