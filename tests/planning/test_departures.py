"""Departures of step times from their lines."""

from __future__ import annotations

import numpy as np
import pytest

from autofit.planning.constants import LEAST_SPREAD
from autofit.planning.curves import Departures, Point, spread_of
from autofit.planning.least_squares import Array

DRAWS = 2000


def _departures(*points: tuple[int, float, float], spread: float = 0.3) -> Departures:
    """Departures of (variant, micro-batch, log departure), measured without noise to speak of."""
    measured = [Point(variant, x, 1.0, 1e-4) for variant, x, _ in points]
    residuals = np.tile([departure for *_, departure in points], (DRAWS, 1))
    return Departures(measured, residuals, spread, variants=3, seed=0)


def _at(departures: Departures, variant: int, size: float) -> Array:
    """The draws of one variant at one micro-batch."""
    return departures.of(np.array([variant]), np.log([size]))[:, 0]


def test_noise_is_no_spread() -> None:
    noise = np.full(400, 0.1)
    residuals = np.random.default_rng(0).normal(0, 0.1, 400)
    assert spread_of(residuals, noise) < 0.05
    assert spread_of(residuals, noise / 10) == pytest.approx(0.1, rel=0.2)
    assert spread_of(np.zeros(0), np.zeros(0)) == LEAST_SPREAD


def test_a_noisy_probe_shows_a_share_of_its_departure() -> None:
    """Half of it, where the noise is as large as departures are; the rest is unknown."""
    residuals = np.full((DRAWS, 1), 0.4)
    departures = Departures([Point(0, 8, 1.0, 0.3)], residuals, 0.3, variants=1, seed=0)
    drawn = _at(departures, 0, 8)
    assert drawn.mean() == pytest.approx(0.2, abs=0.02)
    assert drawn.std() == pytest.approx(0.3 / np.sqrt(2), rel=0.1)


def test_at_a_measured_size_the_departure_is_known() -> None:
    departures = _departures((0, 8, -0.2), (0, 64, 0.5))
    for size, departure in ((8, -0.2), (64, 0.5)):
        drawn = _at(departures, 0, size)
        assert drawn.mean() == pytest.approx(departure, abs=0.001)
        assert drawn.std() < 0.001


def test_all_variants_at_once_are_as_one_by_one() -> None:
    departures = _departures((0, 8, -0.2), (0, 64, 0.5), (2, 8, 0.1))
    sizes = [8.0, 64.0, 16.0]
    together = departures.of(np.arange(3), np.broadcast_to(np.log([sizes]), (DRAWS, 3)))
    plans = departures.of(np.arange(3), np.log(sizes))
    for variant, size in enumerate(sizes):
        alone = _at(departures, variant, size)
        assert np.allclose(together[:, variant], alone)
        assert np.allclose(plans[:, variant], alone)
