"""What a search found beside its answer, as a report file holds it."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from autofit.codec import Amount, Number


class _Delivered(TypedDict):
    num_workers: Amount
    samples_per_second: Number


class _Loader(TypedDict):
    failed: NotRequired[str]
    own_workers: Amount
    consumed_samples_per_second: Number
    delivered: list[_Delivered]
    num_workers: Amount | None
    bottleneck: Literal["device", "loader"] | None
    keeps_workers: bool
    warnings: list[str]


class _Bounds(TypedDict, total=False):
    failed: str
    trace: str
    best: dict[str, Number] | None
    baseline: dict[str, Number] | None


class Findings(TypedDict, total=False):
    """The findings of a report as JSON."""

    loader: _Loader
    bounds: _Bounds
