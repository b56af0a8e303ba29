"""The fixtures of the simulated device, and one search on it."""

from __future__ import annotations

from typing import TypeAlias

import pytest

from autofit.probing.requests import ProbeRequest
from autofit.report.record import Record
from autofit.searching.engine import run_search
from autofit.space import Space
from tests.simulated import DIMENSIONS, SimulatedDevice, device, make_device

__all__ = ["device", "make_device"]

Searched: TypeAlias = tuple[Record, list[ProbeRequest]]


@pytest.fixture(scope="session")
def searched() -> Searched:
    """The search of `device`, and its probes."""
    device = SimulatedDevice(Space(DIMENSIONS, sample_batch_size=4))
    prober = device.prober()
    return run_search(prober, device.spec()), prober.probed
