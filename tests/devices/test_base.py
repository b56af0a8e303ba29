"""What is said of a torch with which autofit was not tried."""

from __future__ import annotations

import pytest

from autofit.checks.doctor import _of_the_installation
from autofit.devices import base
from autofit.devices.base import TRIED_TORCH, notes_on_torch


@pytest.mark.parametrize("version", [*TRIED_TORCH, "2.8.0+cu128", "2.12.1"])
def test_nothing_is_said_of_versions_between_those_that_were_tried(version: str) -> None:
    assert notes_on_torch(version) == ()


@pytest.mark.parametrize(("version", "beside"), [("2.7.1+cu126", 0), ("2.99.0", -1), ("3.0.0", -1)])
def test_a_version_beyond_those_that_were_tried_is_named_once(version: str, beside: int) -> None:
    (note,) = notes_on_torch(version)
    assert version in note
    assert f"than {TRIED_TORCH[beside]}," in note


def test_doctor_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TRIED_TORCH", ("1.0", "1.1"))
    assert all(note in _of_the_installation().found for note in notes_on_torch())
