"""Compares what two steps left behind, no more strictly than two plain steps compare."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

ROOM = 10
"""How many times further apart than two plain steps a checkpointed one may be."""

Remains = dict[str, Any]
"""What a step left behind: names for a reader, tensors and plain values."""


class Noise:
    """How far two runs of the same step are apart: not at all, except on some devices."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}

    def learn(self, one: Remains, other: Remains) -> bool:
        """Take in what two runs of the same step left; whether they differ anywhere."""
        found = {
            name: _relative_difference(value, other[name])
            for name, value in one.items()
            if isinstance(value, torch.Tensor) and not torch.equal(value, other[name])
        }
        for name, difference in found.items():
            self._of[name] = max(difference, self._of.get(name, 0.0))
        return bool(found)

    def allowed(self, name: str) -> float:
        """The relative difference that noise may explain.

        What agreed by luck is allowed what the others need: a kernel that adds in any order does
        so for all of them.
        """
        if not self._of:
            return 0.0
        return ROOM * max(self._of.get(name, 0.0), median(self._of.values()))


def first_difference(plain: Remains, remains: Remains, noise: Noise) -> str | None:
    """What the second left otherwise, in words; None: nothing."""
    for name, value in plain.items():
        if name not in remains:
            return f"it changes what is left behind: no {name}"
        if not _alike(value, remains[name], noise.allowed(name)):
            return f"it changes {name}"
    extra = [name for name in remains if name not in plain]
    return f"it leaves something behind: {extra[0]}" if extra else None


def _alike(one: Any, other: Any, allowed: float) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other or one != one)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num()):
        return True  # a NaN is not equal to itself
    return 0 < _relative_difference(one, other) <= allowed


def _relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    size = float(one.to(wide).norm())
    return float((one.to(wide) - other.to(wide)).norm()) / size if size else float("inf")
