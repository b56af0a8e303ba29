"""What is believed of lines before anything is measured: terms of settings and their deviations.

A line's coefficients A and B are sums of one term per setting. Here a setting's values become prior
means and features of these terms: from hints, from predicted lines, or from wide defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from autofit.plan import Dimension, Scalar, Settings, variant_key
from autofit.planning.least_squares import Array

Hints: TypeAlias = Mapping[tuple[str, Scalar], float]
"""(setting, value) -> expected ratio of a coefficient to that of the setting's first value."""


@dataclass(frozen=True)
class LinePrior:
    """Prior of a family of lines: standard deviations of log coefficients, unless stated otherwise.

    Attributes:
        level: of all lines together; wide, because the device may be anything.
        split: of how the first measured value divides between intercept and slope, each way.
        predicted_level: of the error of slopes that all predicted lines have in common.
        predicted_intercept: likewise of intercepts.
        intercept: of the effect of one value on the intercept.
        hinted_intercept: of the same effect around its hint.
        shared_slope: of the effect on the slope that all values of an unordered setting but the
            first have in common.
        slope: of the effect on the slope of one value alone.
        slope_mean: prior mean of the log slope of a non-plain value of an unordered setting;
            negative because strategies offer values that are expected to help.
        trend: of the effect on the slope of the last value of an ordered setting; the values
            before it have proportional shares of that effect.
        curvature: of the deviation of an ordered setting's values from that trend.
        hinted_slope: of the effect of a value on the slope around its hint.
        predicted_slope: of the same effect around its predicted line.
        own_share: more of the same where it is known: this share of the effect.
        common_share: likewise, in common to all values of the setting: who overrates one precision
            overrates the others.
        interaction: of a variant's slope around the product of its settings' effects.
    """

    level: float = 2.0
    split: float = 1.0
    predicted_level: float = 0.05
    predicted_intercept: float = 0.1
    intercept: float = 0.05
    hinted_intercept: float = 0.15
    shared_slope: float = 0.5
    slope: float = 0.5
    slope_mean: float = -0.2
    trend: float = 0.6
    curvature: float = 0.4
    hinted_slope: float = 0.07
    predicted_slope: float = 0.03
    own_share: float = 0.0
    common_share: float = 0.0
    interaction: float = 0.06


MEMORY_PRIOR = LinePrior(trend=0.7, curvature=0.4)
TIME_PRIOR = LinePrior(trend=0.3, curvature=0.15)
PREDICTED_TIME_PRIOR = replace(
    TIME_PRIOR,
    intercept=0.2,
    predicted_level=1.0,
    predicted_intercept=2.5,  # a roofline knows of no launches
    predicted_slope=0.08,
    own_share=0.12,
    common_share=0.25,
)
"""The roofline of a model is off by any factor, and by a share of each setting's effect: on the two
recorded grids by 0.1 to 0.4 of a precision's, by 0.3 at most of a checkpoint level's."""


def shared_features(count: int, prior: LinePrior, predicted: bool) -> tuple[Array, Array]:
    """Return features for A and B of two terms of all variants.

    Of predicted lines one shifts the intercepts and one the slopes, else one shifts and one tilts.
    """
    ones, none = np.ones((count, 1)), np.zeros((count, 1))
    if predicted:
        shifts = prior.predicted_intercept * ones, prior.predicted_level * ones
        return np.hstack([shifts[0], none]), np.hstack([none, shifts[1]])
    level, split = prior.level * ones, prior.split * ones
    return np.hstack([level, split]), np.hstack([level, -split])


def log_effects(name: str, dimension: Dimension, hints: Hints) -> dict[Scalar, float]:
    return {v: float(np.log(hints[name, v])) for v in dimension.values if (name, v) in hints}


def predicted_effects(
    name: str,
    dimension: Dimension,
    variants: Sequence[Settings],
    lines: Mapping[int, tuple[float, float]],
) -> dict[Scalar, tuple[float, float]]:
    """Return log effects on (intercept, slope) of values with a predicted line."""
    found = {variant_key(variants[index]): np.log(line) for index, line in lines.items()}
    effects: dict[Scalar, tuple[float, float]] = {}
    for value in dimension.values[1:]:
        line = found.get(variant_key({**variants[0], name: value}))
        if line is not None:
            intercept, slope = line - np.log(lines[0])
            effects[value] = float(intercept), float(slope)
    return effects


@dataclass(frozen=True)
class Terms:
    """The terms of one setting: prior means, (variants), and features, (variants, terms).

    A feature is the standard deviation of its term, because weights are standard normal.
    """

    mean_a: Array
    mean_b: Array
    features_a: Array
    features_b: Array

    @classmethod
    def of_setting(
        cls,
        values: Sequence[Scalar],
        by_variant: Sequence[Scalar],
        prior: LinePrior,
        intercept_hints: Mapping[Scalar, float],
        slope_hints: Mapping[Scalar, float],
        predicted: Mapping[Scalar, tuple[float, float]],
    ) -> Terms:
        """Return the terms of a setting with these values; a prediction overrides a hint.

        Args:
            values: of the setting.
            by_variant: the value that each variant has.
            prior: the standard deviations.
            intercept_hints, slope_hints: value -> log effect.
            predicted: value -> log effects on intercept and slope.
        """
        rows = [values.index(value) for value in by_variant]
        intercepts = {**intercept_hints, **{v: both[0] for v, both in predicted.items()}}
        slopes = {**slope_hints, **{v: both[1] for v, both in predicted.items()}}
        is_ordered = _is_ordered(values)
        # Between predicted values of an ordered setting the effect is interpolated.
        known_between = bool(predicted) and is_ordered
        hinted = np.array([v in intercept_hints and v not in predicted for v in values])
        mean_a = _effects(values, intercepts, known_between)
        features_a = _one_each(np.where(hinted, prior.hinted_intercept, prior.intercept))
        if slopes:
            known = np.array([value in slopes for value in values])
            mean_b = _effects(values, slopes, known_between)
            is_predicted = np.array([value in predicted for value in values])
            around = np.where(is_predicted, prior.predicted_slope, prior.hinted_slope)
            around = np.hypot(around, prior.own_share * mean_b)
            own = _one_each(np.where(known, around, prior.slope))
            features_b = np.hstack([prior.common_share * mean_b[:, None], own])
        elif is_ordered:
            mean_b, features_b = np.zeros(len(values)), _trend_features(len(values), prior)
        else:
            is_changed = (np.arange(len(values)) > 0)[:, None]
            mean_b = np.where(is_changed[:, 0], prior.slope_mean, 0.0)
            own = _one_each(np.full(len(values), prior.slope))
            features_b = np.hstack([prior.shared_slope * is_changed, own])
        return cls(mean_a[rows], mean_b[rows], features_a[rows], features_b[rows])


def _effects(values: Sequence[Scalar], known: Mapping[Scalar, float], between: bool) -> Array:
    """Return the log effect of each value; unknown ones are 0, or interpolated if `between`."""
    if not between:
        return np.array([known.get(value, 0.0) for value in values])
    points = {values[0]: 0.0, **known}
    at = sorted(points, key=values.index)
    effects: Array = np.interp(
        range(len(values)), [values.index(value) for value in at], [points[value] for value in at]
    )
    return effects


def _one_each(deviations: Array) -> Array:
    """Return (values, values - 1): an independent term for each value but the first."""
    features: Array = np.diag(deviations)[:, 1:]
    return features


def _trend_features(count: int, prior: LinePrior) -> Array:
    """Return (values, values): a straight trend, and a random walk around it."""
    last, index = count - 1, np.arange(count)[:, None]
    steps = (np.arange(1, count) <= index) * prior.curvature / np.sqrt(last)
    return np.hstack([prior.trend * index / last, steps])


def _is_ordered(values: Sequence[Scalar]) -> bool:
    """Return whether neighbouring values can be expected to have similar effects."""
    if len(values) < 3 or any(isinstance(v, bool | str) for v in values):
        return False
    return list(values) == sorted(values, key=float)
