"""Dimensions of simulated worlds, with the values that the strategies name as levers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autofit.plan import Dimension, Scalar

JUDGED_STEPS = 10_000
"""Over so many steps what a costly value takes to start counts in the speed of a plan."""
LEVERS = ("bfloat16", "float16", "tf32", "channels_last", "fused", "foreach")


def dimension_of(values: Sequence[Scalar], **known: Any) -> Dimension:
    """Return the dimension of these values, with the first lever among those that are not plain."""
    offered = [value for value in LEVERS if value in values[1:]]
    return Dimension(values, lever=next(iter(offered), None), **known)
