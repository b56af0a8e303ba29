"""Weights move from their prior draws just as far as the readings ask for."""

from __future__ import annotations

import numpy as np
import pytest

from autofit.planning.curve_fit import Readings, nearest

PRIOR = np.random.default_rng(0).standard_normal((50, 2))


def _reading(y: float, sd: float, *, at_least: bool = False) -> Readings:
    """One line without a slope to speak of: log y is the first weight, the second does nothing."""
    return Readings(
        log_x=np.zeros(1),
        log_y=np.log([y]),
        sd=np.array([sd]),
        at_least=np.array([at_least]),
        mean_a=np.zeros(1),
        mean_b=np.full(1, -100.0),
        features_a=np.array([[1.0, 0.0]]),
        features_b=np.array([[0.0, 1.0]]),
    )


@pytest.mark.parametrize("sd", [0.01, 1.0, 3.0])
def test_a_linear_problem_has_the_answer_of_the_textbook(sd: float) -> None:
    """The mean of prior and reading, each weighted by the inverse of its variance."""
    weights = nearest(PRIOR, _reading(5.0, sd), np.zeros((50, 1)))
    expected = (PRIOR[:, 0] * sd**2 + np.log(5.0)) / (sd**2 + 1)
    assert np.allclose(weights[:, 0], expected)
    assert np.allclose(weights[:, 1], PRIOR[:, 1])


def test_every_world_has_its_own_error_of_the_reading() -> None:
    errors = np.linspace(-2, 2, 50)[:, None]
    weights = nearest(PRIOR, _reading(5.0, 1e-3), errors)
    assert np.allclose(weights[:, 0], np.log(5.0) + 1e-3 * errors[:, 0], atol=1e-5)


def test_a_bound_moves_only_the_worlds_below_it() -> None:
    weights = nearest(PRIOR, _reading(1.0, 1e-3, at_least=True), np.zeros((50, 1)))
    below = PRIOR[:, 0] < 0
    assert 0 < below.sum() < 50
    assert np.allclose(weights[~below], PRIOR[~below])
    assert np.allclose(weights[below, 0], 0, atol=1e-5)
