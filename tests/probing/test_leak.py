"""Growth at the step boundary: what is a leak, what a cycle, what nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autofit.probing.leak import HORIZON_STEPS, Growth, bytes_per_step, growth
from autofit.units import GIB, MIB


@pytest.mark.parametrize(
    ("boundaries", "per_step"),
    [
        ([100, 100, 100], None),
        ([100, 200], None),
        ([100, 200, 300], 100),
        ([100, 612, 612, 612], None),
        ([900, 100, 200, 300, 400, 500, 600, 700, 800, 900], 100),
        ([100, 200, 300, 250, 350], None),
        ([0, 10, 20, 1020], 10),
    ],
    ids=["flat", "too few", "steady", "one step up", "after warm-up", "dips", "median"],
)
def test_growth_is_steady_or_none(boundaries: Sequence[int], per_step: int | None) -> None:
    assert bytes_per_step(boundaries) == per_step
    found = growth(boundaries, boundaries[-1])
    assert (found.bytes_per_step if found else None) == per_step


def test_what_the_collector_takes_back_is_a_cycle() -> None:
    boundaries = [MIB, 2 * MIB, 3 * MIB]
    kept = growth(boundaries, collected_bytes=3 * MIB)
    cycle = growth(boundaries, collected_bytes=MIB)
    assert kept == Growth(MIB, collectable=False)
    assert cycle == Growth(MIB, collectable=True)
    assert kept.is_leak(GIB)
    assert not cycle.is_leak(GIB)
    assert "cycle" in cycle.words(GIB)


def test_a_leak_says_when_the_budget_is_reached() -> None:
    words = Growth(MIB, collectable=False).words(GIB)
    assert "1.00 MiB" in words
    assert "1024 steps" in words
    assert Growth(MIB, collectable=False).steps_until(-5) == 0


def test_a_kept_number_is_no_leak() -> None:
    number = Growth(512, collectable=False)
    assert not number.is_leak(512 * HORIZON_STEPS)
    assert number.is_leak(512 * HORIZON_STEPS - 1)
