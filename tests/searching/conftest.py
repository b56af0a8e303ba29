"""The fixtures of the simulated device, with fewer variants."""

from __future__ import annotations

import pytest

from autofit.space import Space
from tests.simulated import FEW_DIMENSIONS, SimulatedDevice, make_device

__all__ = ["make_device"]


@pytest.fixture
def device() -> SimulatedDevice:
    """Six variants, free micro-batch."""
    return SimulatedDevice(Space(FEW_DIMENSIONS, sample_batch_size=4))
