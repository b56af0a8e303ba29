"""What the values of one setting do to a variant's line: the terms that variants share.

A term is a feature scaled by its standard deviation, around a prior mean that hints and predicted
lines move. The values of an ordered setting follow a trend and stray from it step by step; those
of an unordered one have a part in common and each its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autofit.curve_fit import Array
from autofit.plan import Dimension, Scalar, Settings, variant_key

Factors = tuple[float, float]
"""Logarithms of what a value does to intercept and slope."""


@dataclass(frozen=True)
class Spread:
    """How far the terms of a line may lie from their prior means, as standard deviations of logs.

    Attributes:
        level: of all values together; wide, since a device may be anything.
        split: of how the first value measured is split between intercept and slope, each way.
        predicted: of how far predicted lines are off, all together.
        intercept: of what one setting does to the intercept.
        common: of what all values of an unordered setting but the first do to the slope alike.
        slope: of what one of them does to the slope beside that.
        help: no deviation but the mean of what they do: values are offered because they may help.
        trend: of what the last value of an ordered setting does to the slope, as a straight trend.
        bend: of how far the values of an ordered setting stray from that trend.
        hinted: of what a value does to the slope, around its hint or its predicted line.
        own: of a variant's own slope around the product of its settings'.
    """

    level: float = 2.0
    split: float = 1.0
    predicted: float = 0.15
    intercept: float = 0.05
    common: float = 0.5
    slope: float = 0.5
    help: float = -0.2
    trend: float = 0.6
    bend: float = 0.4
    hinted: float = 0.07
    own: float = 0.06


def predicted_factors(
    name: str,
    dimension: Dimension,
    variants: Sequence[Settings],
    lines: Mapping[int, tuple[float, float]],
) -> dict[Scalar, Factors]:
    """By value, for those whose line beside plain values was predicted."""
    found = {variant_key(variants[index]): np.log(line) for index, line in lines.items()}
    factors: dict[Scalar, Factors] = {}
    for value in dimension.values[1:]:
        line = found.get(variant_key({**variants[0], name: value}))
        if line is not None:
            intercept, slope = line - np.log(lines[0])
            factors[value] = float(intercept), float(slope)
    return factors


class Terms:
    """What the values of one setting contribute to slopes and intercepts."""

    def __init__(
        self,
        name: str,
        dimension: Dimension,
        spread: Spread,
        hints: Mapping[tuple[str, Scalar], float],
        predicted: Mapping[Scalar, Factors],
    ) -> None:
        self._name, self._values, self._spread = name, list(dimension.values), spread
        self._hints = {v: float(np.log(hints[name, v])) for v in self._values if (name, v) in hints}
        self._hints |= {value: slope for value, (_, slope) in predicted.items()}
        self._predicted = predicted

    def intercept_means(self, variants: Sequence[Settings]) -> Array:
        """The predicted part of each variant's log intercept."""
        means = {value: intercept for value, (intercept, _) in self._predicted.items()}
        return self._rows(variants, lambda i: self._between(self._values[i], means))

    def slope_means(self, variants: Sequence[Settings]) -> Array:
        """The hinted and predicted part of each variant's log slope."""
        return self._rows(variants, lambda i: self._slope_mean(self._values[i]))

    def _slope_mean(self, value: Scalar) -> float:
        if self._hints:
            return self._between(value, self._hints)
        if _ordered(self._values) or value == self._values[0]:
            return 0.0
        return self._spread.help

    def _between(self, value: Scalar, known: Mapping[Scalar, float]) -> float:
        """What is known of a value; of ordered ones, between those that were predicted too."""
        if value in known or not (self._predicted and _ordered(self._values)):
            return known.get(value, 0.0)
        points = {self._values[0]: 0.0, **known}
        at = sorted(points, key=self._values.index)
        places = [self._values.index(each) for each in at]
        return float(np.interp(self._values.index(value), places, [points[each] for each in at]))

    def slope_features(self, variants: Sequence[Settings]) -> Array:
        """(variants, terms): the terms' standard deviations, where a variant has them."""
        return self._rows(variants, self._slope_row)

    def intercept_features(self, variants: Sequence[Settings]) -> Array:
        """Likewise for the intercept."""
        return self._rows(variants, lambda i: self._spread.intercept * self._own_column(i))

    def _rows(self, variants: Sequence[Settings], row: Callable[[int], Array | float]) -> Array:
        rows: Array = np.array([row(i) for i in range(len(self._values))])[self._where(variants)]
        return rows

    def _where(self, variants: Sequence[Settings]) -> list[int]:
        """Which value each variant has."""
        place = {value: index for index, value in enumerate(self._values)}
        return [place[settings[self._name]] for settings in variants]

    def _own_column(self, index: int) -> Array:
        """One column per value but the first."""
        column: Array = np.eye(len(self._values))[index][1:]
        return column

    def _slope_row(self, index: int) -> Array:
        if self._hints:
            hinted = self._values[index] in self._hints
            return (self._spread.hinted if hinted else self._spread.slope) * self._own_column(index)
        if not _ordered(self._values):
            own = self._spread.slope * self._own_column(index)
            return np.concatenate([[self._spread.common * (index > 0)], own])
        last = len(self._values) - 1
        steps = (np.arange(1, last + 1) <= index) * self._spread.bend / np.sqrt(last)
        return np.concatenate([[self._spread.trend * index / last], steps])


def _ordered(values: Sequence[Scalar]) -> bool:
    """Whether neighbouring values may be expected to do alike: three or more growing numbers."""
    if len(values) < 3 or any(isinstance(v, bool | str) for v in values):
        return False
    return list(values) == sorted(values, key=float)
