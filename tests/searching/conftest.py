"""The fixtures of the simulated device, with fewer variants."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.space import Space
from tests.simulated import FEW_DIMENSIONS, SimulatedDevice, make_device

__all__ = ["make_device"]


@pytest.fixture
def device() -> SimulatedDevice:
    """Six variants, free micro-batch."""
    return SimulatedDevice(Space(FEW_DIMENSIONS, sample_batch_size=4))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test keeps its study."""
    return tmp_path / "study.journal"
