"""The fixtures of the simulated device, with fewer variants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan
from autofit.searching import events
from autofit.space import Space
from tests.simulated import FEW_DIMENSIONS, SimulatedDevice, make_device

__all__ = ["make_device"]


@pytest.fixture
def device() -> SimulatedDevice:
    """Six variants, free micro-batch."""
    return SimulatedDevice(Space(FEW_DIMENSIONS, sample_batch_size=4))


def fails_from(
    count: int, how: BaseException | Outcome, once: bool = False
) -> Callable[[Plan], Measurement | None]:
    """The fault of a device: so many attempts succeed, and what follows, or the next, ends so."""
    attempts = itertools.count()

    def fault(plan: Plan) -> Measurement | None:
        number = next(attempts)
        if number < count or (once and number > count):
            return None
        if isinstance(how, Outcome):
            return Measurement(how, "on purpose")
        raise how

    return fault


def of_kind(seen: Sequence[events.Event], kind: type[Any]) -> list[Any]:
    """The events of a kind."""
    return [event for event in seen if isinstance(event, kind)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test keeps its study."""
    return tmp_path / "study.journal"
