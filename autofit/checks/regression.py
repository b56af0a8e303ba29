"""Comparison of a verdict with an earlier one: how much more memory does the training need?

The earlier one is the output of `autofit check --json`, or the report of a search. Required bytes
are compared if both have the same method, else peak allocated bytes. Bytes on the CPU and on a GPU
are never compared; another plan, GPU or method is named.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from autofit.checks.verdict import Verdict
from autofit.codec import read_json
from autofit.devices.gpus import find_gpu
from autofit.errors import InvalidArgument
from autofit.plan import Settings
from autofit.report.record import Record
from autofit.units import format_bytes, kind_of


@dataclass(frozen=True)
class Regression:
    """The memory of a training now and at an earlier time.

    Attributes:
        quantity: name of the compared figure.
        before_bytes: the earlier figure.
        now_bytes: the present figure.
        allowed: largest allowed growth, as a fraction.
        differs: other differences in words, such as another plan.
    """

    quantity: str
    before_bytes: int
    now_bytes: int
    allowed: float
    differs: tuple[str, ...] = ()

    @property
    def growth(self) -> float:
        """Growth as a fraction; negative if the figure fell."""
        return self.now_bytes / self.before_bytes - 1

    @property
    def passed(self) -> bool:
        """Whether the growth is allowed."""
        return self.growth <= self.allowed

    def __str__(self) -> str:
        differs = f", but not of the same: {'; '.join(self.differs)}" if self.differs else ""
        return (
            f"{self.quantity} {self.growth:+.1%} ({format_bytes(self.before_bytes)} to "
            f"{format_bytes(self.now_bytes)}; at most {self.allowed:+.1%} allowed){differs}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        derived = {"growth": self.growth, "passed": self.passed, "differs": list(self.differs)}
        return vars(self) | derived


def compare_with(verdict: Verdict, path: str | os.PathLike[str], allowed: float) -> Regression:
    """Compare a verdict with an earlier one.

    Args:
        verdict: the present one.
        path: output of `autofit check --json`, or a report.
        allowed: largest allowed growth, as a fraction.

    Raises:
        InvalidArgument: the file cannot be read, is neither of the two, or has no figure in common
            with the verdict (one is of the CPU and the other of a GPU, say).
    """
    before, defaults = read_earlier(path)
    if verdict.device and before.device and verdict.device != before.device:
        raise InvalidArgument(
            f"{os.fspath(path)} was made on {before.gpu or before.device}, and this check on "
            f"{verdict.gpu or verdict.device}: memory on a CPU and on a GPU cannot be compared. "
            "Check on the same kind of device"
        )
    alike = [("required bytes", "required_bytes")] * (before.method == verdict.method)
    for quantity, name in (*alike, ("peak allocated bytes", "peak_allocated_bytes")):
        now, then = getattr(verdict, name), getattr(before, name)
        if now is not None and then:
            return Regression(quantity, then, now, allowed, _differences(before, verdict, defaults))
    raise InvalidArgument(
        f"{os.fspath(path)} and the new verdict cannot be compared: the new verdict comes from a "
        f"{verdict.method} and {'fits' if verdict.fits else 'has no measured memory'}"
    )


def read_earlier(path: str | os.PathLike[str]) -> tuple[Verdict, Settings]:
    """Return the earlier verdict, or that of a report's best plan, and its default settings.

    Raises:
        InvalidArgument: the file cannot be read, or is neither of the two.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"cannot read {os.fspath(path)} to compare with: {why}") from error
    try:
        return _earlier(content)
    except (TypeError, InvalidArgument) as error:
        raise InvalidArgument(
            f"{os.fspath(path)} is neither a report nor output of `autofit check --json`: {error}"
        ) from error


def read_fraction(text: str) -> float:
    """Return "5%" or "0.05" as 0.05.

    Raises:
        InvalidArgument: the text is neither, or a number from 1, which could mean percent.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise InvalidArgument(f"cannot read {text!r} as a fraction: write it like 5% or 0.05")
    number, percent = float(match[1]), bool(match[2])
    if number >= 1 and not percent:
        raise InvalidArgument(
            f"{match[1]} could mean {match[1]}% or {100 * number:g}%: write one of them"
        )
    return number / (100 if percent else 1)


def _earlier(content: Any) -> tuple[Verdict, Settings]:
    if not isinstance(content, dict):
        raise TypeError(f"it holds {kind_of(content)}")
    if "best" not in content:
        return Verdict.from_dict(content), {}
    record = Record.from_dict(content)
    best = record.best
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
    return verdict, record.default_settings


def _differences(before: Verdict, now: Verdict, defaults: Settings) -> tuple[str, ...]:
    """Return the differences in plan, GPU and method; older files lack some of these."""
    plans = [str(verdict.plan.without(defaults)) for verdict in (before, now)]
    gpus = [_known_name(verdict.gpu) for verdict in (before, now)]
    methods = [f"by {verdict.method}" for verdict in (before, now)]
    return tuple(
        f"{was} then, {become} now"
        for was, become in (plans, gpus, methods)
        if was and become and was != become
    )


def _known_name(gpu: str | None) -> str | None:
    """Return one name for "NVIDIA H200" and "H200"."""
    try:
        return gpu and find_gpu(gpu).name
    except InvalidArgument:
        return gpu
