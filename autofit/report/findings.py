"""What a search found beside its answer, as a report file holds it."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from autofit.codec import Amount, Count, Number
from autofit.plan import Plan


class _LoaderSettings(TypedDict):
    batch_size: Count
    num_workers: Amount
    pin_memory: bool
    prefetch_factor: Count | None


class _Delivered(TypedDict):
    settings: _LoaderSettings
    samples_per_second: Number


class _EndToEnd(_Delivered):
    warnings: list[str]


class _Loader(TypedDict):
    failed: NotRequired[str]
    settings: _LoaderSettings | None
    own_settings: _LoaderSettings
    bottleneck: Literal["device", "loader", "cores"] | None
    consumed_samples_per_second: Number
    host_bytes: Amount | None
    most_workers: Amount | None
    keeps_workers: NotRequired[bool]
    delivered: list[_Delivered]
    end_to_end: list[_EndToEnd]


class _Bounds(TypedDict, total=False):
    failed: str
    trace: str
    best: dict[str, Number] | None
    baseline: dict[str, Number] | None


class _Allocator(TypedDict, total=False):
    failed: str
    setting: str
    recommended: bool
    probes: Count
    lowers_required_bytes: bool
    held_bytes: Amount | None
    held_bytes_with: Amount | None
    plan_without_retries: Plan | None


class Findings(TypedDict, total=False):
    """The findings of a report as JSON."""

    loader: _Loader
    bounds: _Bounds
    allocator: _Allocator
