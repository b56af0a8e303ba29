"""Compares what two steps left behind, no more strictly than two plain steps compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import sqrt
from statistics import median
from typing import Any

import torch

from autofit.strategy import TrainingView

ROOM = 10
"""How many times further apart than two plain steps a checkpointed one may be."""

MOST_NOISE = 0.05
"""Kernels that add in any order are no further apart, in bfloat16 either."""

LOSS, GRADIENT = "loss", "the gradient of "
"""What the noise is judged by; the names of gradients begin like this."""

Remains = dict[str, Any]
"""What a step left behind: names for a reader, tensors and plain values."""


class NotRepeatable(Exception):
    """Two runs of the same step from the same state train differently."""


class Noise:
    """How far two runs of the same step are apart: not at all, except on some devices.

    Args:
        is_device_exact: whether the device's kernels give the same twice. Then what differs does so
            for a reason, such as a count that no one sees, and is no noise.
    """

    def __init__(self, is_device_exact: bool) -> None:
        self._most = 0.0 if is_device_exact else MOST_NOISE
        self._of: dict[str, float] = {}
        self._untold: set[str] = set()

    def learn(self, one: Remains, other: Remains) -> bool:
        """Take in what two runs of the same step left; whether they differ anywhere.

        Raises:
            NotRepeatable: loss or gradients differ by more than this device's noise.
        """
        names = [name for name, value in one.items() if not _alike(value, other.get(name), 0.0)]
        for kind in ([LOSS], [name for name in one if name.startswith(GRADIENT)]):
            self._assert_noise(one, other, kind)
        for name in names:
            if _are_comparable(one[name], other.get(name)):
                difference = _relative_difference(one[name], other[name])
                self._of[name] = max(difference, self._of.get(name, 0.0))
            else:  # the time of day, say
                self._untold.add(name)
        return bool(names)

    def allowed(self, name: str) -> float:
        """The relative difference that noise may explain.

        What agreed by luck is allowed what loss and gradients need: a kernel that adds in any
        order does so for all of them. What else differs (the time of day, in a buffer) is no
        measure for others.
        """
        trained = [apart for of, apart in self._of.items() if _is_trained_by(of)]
        return ROOM * max(self._of.get(name, 0.0), median(trained) if trained else 0.0)

    def tells(self, name: str) -> bool:
        """Whether this says anything: two plain runs left the same there, or tensors alike."""
        return name not in self._untold

    def _assert_noise(self, one: Remains, other: Remains, names: Sequence[str]) -> None:
        """All of them together: a gradient that is zero but for rounding never repeats."""
        apart = size = 0.0
        for name in names:
            value, again = one[name], other.get(name)
            size += _norm(value) ** 2
            if _are_comparable(value, again):
                value = _wide(value) - _wide(again)
            apart += _norm(value) ** 2
        difference = sqrt(apart / size) if size else sqrt(apart)
        if difference > self._most:
            what = LOSS if names == [LOSS] else "gradients"
            why = f"two plain steps from the same state differ, their {what} by {difference:.2g}"
            raise NotRepeatable(f"{why} of their size")


def _is_trained_by(name: str) -> bool:
    return name == LOSS or name.startswith(GRADIENT)


@contextmanager
def gradients_into(training: TrainingView, remains: Remains) -> Iterator[None]:
    """Note the gradients in place of every update, so that the weights stay."""

    updates = count(1)

    def note(step: Callable[[], None]) -> None:  # not called: that is the point
        update = next(updates)
        for name, parameter in training.model.named_parameters():
            if parameter.grad is not None:
                key = f"{GRADIENT}{name}" + (f" at update {update}" if update > 1 else "")
                remains[key] = _strided(parameter.grad.detach())

    undo = training.wrap_optimizer_step(note)
    try:
        yield
    finally:
        undo()


def _strided(gradient: torch.Tensor) -> torch.Tensor:
    """A copy that compares: of a sparse gradient (an embedding's), the rows that have one."""
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()
        return torch.cat([gradient.values().flatten(), gradient.indices().flatten()])
    return gradient.to_dense() if gradient.layout != torch.strided else gradient.clone()


def first_difference(plain: Remains, remains: Remains, noise: Noise) -> str | None:
    """What the second left otherwise, in words; None: nothing."""
    for name, value in plain.items():
        if not noise.tells(name):
            continue
        if name not in remains:
            return f"it changes what is left behind: no {name}"
        if not _alike(value, remains[name], noise.allowed(name)):
            return f"it changes {name}"
    extra = [name for name in remains if name not in plain]
    return f"it leaves something behind: {extra[0]}" if extra else None


def _alike(one: Any, other: Any, allowed: float) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other or one != one)
    if not _are_comparable(one, other):
        return False
    if torch.equal(one, other):
        return True
    if one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num()):
        return True  # a NaN is not equal to itself
    return 0 < _relative_difference(one, other) <= allowed


def _are_comparable(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape and one.dtype == other.dtype


def _relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    size = _norm(one)
    return _norm(_wide(one) - _wide(other)) / size if size else float("inf")


def _norm(tensor: torch.Tensor) -> float:
    return float(_wide(tensor).norm())


def _wide(tensor: Any) -> torch.Tensor:
    wide: torch.Tensor = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return wide
