"""The changes of the ablation reach the planner, and are taken back."""

from __future__ import annotations

from typing import Any

from autofit.planning import departures, posterior, proposals
from benchmarks import ablation


def _values(change: ablation.Change) -> list[Any]:
    return [getattr(ablation.owner_of(owner), name) for owner, name, _ in change.values]


def test_every_change_is_made_and_taken_back() -> None:
    for change in list(ablation.changes())[1:]:
        before = _values(change)
        with ablation.changed(change):
            meanwhile = _values(change)
        assert meanwhile == [value for _, _, value in change.values] != before
        assert _values(change) == before


def test_a_number_is_changed_wherever_it_was_imported_to() -> None:
    places = [vars(module) for module in (departures, posterior, proposals)]
    before = departures.LEAST
    with ablation.changed(ablation.Change("more", (("departures", "LEAST", 0.5),))):
        assert [names["LEAST"] for names in places] == [0.5] * 3
    assert [names["LEAST"] for names in places] == [before] * 3
