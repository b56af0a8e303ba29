"""A VRAM budget as people write it."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.devices.request import budget_bytes
from autofit.errors import InvalidArgument

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
        ("81GiB", "81.0 GiB.*80.0 GiB"),
        (81 * GIB, "81.0 GiB.*80.0 GiB"),
        ("lots", "'lots'"),
        (24, "24 bytes.*'24GiB'"),
        ("24", "'24'.*'24GiB'"),
        ("900KiB", "921600 bytes.*1MiB"),
        (1e-9, "85 bytes"),
        (0, "bytes.*0"),
        (-5, "bytes.*-5"),
        (0.0, r"\(0, 1\].*0\.0"),
        (24e9, r"\(0, 1\]"),
        (float("nan"), r"\(0, 1\].*nan"),
        (True, "fraction.*True"),
        ([24], "fraction"),
    ],
)
def test_what_is_no_budget_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        _budget(asked)
