"""A VRAM budget as people write it."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.devices.base import budget_bytes
from autofit.errors import InvalidRequest

GIB = 2**30


def _budget(asked: Any, *, total: int = 80 * GIB, free: int = 70 * GIB) -> int:
    return budget_bytes(asked, total_bytes=total, free_bytes=free)


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        ("24GiB", 24 * GIB),
        ("80GiB", 80 * GIB),
        (10 * GIB, 10 * GIB),
        (2**20, 2**20),
        (0.5, 40 * GIB),
        (1.0, 80 * GIB),
    ],
)
def test_text_bytes_and_fractions_of_the_device(asked: str | float, budget: int) -> None:
    assert _budget(asked) == budget


def test_without_one_it_is_what_is_free_less_a_margin() -> None:
    assert _budget(None) == 70 * GIB - int(0.03 * 70 * GIB)
    assert _budget(None, free=4 * GIB) == 4 * GIB - 256 * 2**20
    assert _budget(None, free=GIB) == GIB - GIB // 10


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("81GiB", "81.0 GiB is larger than the device, which has 80.0 GiB"),
        (81 * GIB, "larger than the device"),
        ("lots", "cannot read 'lots' as a size"),
        (24, "24 is 24 bytes: did you mean '24GiB'"),
        ("24", "'24' is 24 bytes: did you mean '24GiB'"),
        ("900KiB", "921600 bytes: write 1MiB or more"),
        (1e-9, "is 85 bytes"),
        (0, "above zero bytes, got 0"),
        (-5, "above zero bytes, got -5"),
        (0.0, r"must be in \(0, 1\], got 0.0"),
        (24e9, r"must be in \(0, 1\]"),
        (float("nan"), r"must be in \(0, 1\], got nan"),
        (True, "bytes or a fraction: True"),
        ([24], "bytes or a fraction"),
    ],
)
def test_what_is_no_budget_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _budget(asked)
