"""What a timeline says a placement holds, on cases small enough to count by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Part = Callable[[str], Any]


@pytest.fixture
def chain(part: Part) -> Any:
    """Three units that save 10, 20 and 30 bytes twice each; the first of each pair is its input."""
    timeline = part("saved_tensors")
    sizes = [10, 10, 20, 20, 30, 30]
    storages = [timeline.Storage(size, place, place) for place, size in enumerate(sizes)]
    calls = [timeline.Call(f"unit{i}", 2 * i, 2 * i + 2, (2 * i,)) for i in range(3)]
    return timeline.Timeline(storages, calls)


def test_plain_training_peaks_at_its_end(chain: Any) -> None:
    assert chain.saved_bytes == 120
    assert chain.peak(()) == 120 + 2 * 30, "all that is saved, and two gradients"


def test_a_unit_gives_back_all_but_its_input(chain: Any) -> None:
    assert [chain.gain(f"unit{i}") for i in range(3)] == [10, 20, 30]


def test_early_units_lower_the_peak_and_the_last_one_does_not(chain: Any) -> None:
    assert chain.peak(["unit0"]) == 110 + 60
    assert chain.peak(["unit0", "unit1"]) == 90 + 60
    assert chain.peak(["unit2"]) == chain.peak(())
    assert chain.peak(["unit0", "unit1", "unit2"]) == chain.peak(["unit0", "unit1"])


def test_what_another_unit_needs_too_stays(part: Part) -> None:
    timeline = part("saved_tensors")
    storages = [timeline.Storage(10, 0, 0), timeline.Storage(50, 1, 3), timeline.Storage(20, 2, 2)]
    calls = [timeline.Call("one", 0, 2, (0,)), timeline.Call("two", 2, 4, ())]
    found = timeline.Timeline(storages, calls)
    assert found.gain("one") == 0
    assert found.gain("two") == 20


def test_an_input_that_nobody_saved_is_kept_for_the_unit(part: Part) -> None:
    timeline = part("saved_tensors")
    storages = [timeline.Storage(40, 0, 0, saved=False), timeline.Storage(60, 0, 0)]
    found = timeline.Timeline(storages, [timeline.Call("unit", 0, 1, (0,))])
    assert found.saved_bytes == 60
    assert found.gain("unit") == 20


def test_every_call_of_a_shared_unit_counts(part: Part) -> None:
    timeline = part("saved_tensors")
    storages = [timeline.Storage(10, place, place) for place in range(6)]
    calls = [timeline.Call("shared", 2 * i, 2 * i + 2, (2 * i,)) for i in range(3)]
    found = timeline.Timeline(storages, calls)
    assert found.gain("shared") == 30
    assert found.peak(["shared"]) == 30 + 10 + 20, "three inputs, one call brought back, gradients"
