"""The least-squares problem of lines through measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autofit.planning.least_squares import Readings, fit, nearest

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
        features_y=np.zeros((1, 2)),
        power=np.ones((1, 1)),
    )


@pytest.mark.parametrize("sd", [0.01, 1.0, 3.0])
def test_a_linear_problem_has_the_textbook_solution(sd: float) -> None:
    """The mean of prior and reading, each weighted by the inverse of its variance."""
    weights = nearest(PRIOR, _reading(5.0, sd), np.zeros((50, 1)))
    expected = (PRIOR[:, 0] * sd**2 + np.log(5.0)) / (sd**2 + 1)
    assert np.allclose(weights[:, 0], expected)
    assert np.allclose(weights[:, 1], PRIOR[:, 1])


def test_every_draw_has_its_own_error_of_the_reading() -> None:
    errors = np.linspace(-2, 2, 50)[:, None]
    weights = nearest(PRIOR, _reading(5.0, 1e-3), errors)
    assert np.allclose(weights[:, 0], np.log(5.0) + 1e-3 * errors[:, 0], atol=1e-5)


def test_a_bound_moves_only_the_draws_below_it() -> None:
    weights = nearest(PRIOR, _reading(1.0, 1e-3, at_least=True), np.zeros((50, 1)))
    below = PRIOR[:, 0] < 0
    assert 0 < below.sum() < 50
    assert np.allclose(weights[~below], PRIOR[~below])
    assert np.allclose(weights[below, 0], 0, atol=1e-5)


@pytest.mark.parametrize("sd", [0.1, 1.0])
@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_the_evidence_of_a_linear_problem_is_the_density_of_its_readings(
    sd: float, spread: float
) -> None:
    """Of three readings of one normal term, with errors of their own."""
    log_y = np.array([0.3, 0.5, -0.1])
    one = _reading(1.0, sd)
    problem = replace(
        one,
        log_x=np.zeros(3),
        log_y=log_y,
        sd=np.full(3, sd),
        at_least=np.zeros(3, dtype=bool),
        mean_a=np.zeros(3),
        mean_b=np.full(3, -100.0),
        features_a=np.array([[spread, 0.0]] * 3),
        features_b=np.zeros((3, 2)),
        features_y=np.zeros((3, 2)),
    )
    covariance = spread**2 * np.ones((3, 3)) + sd**2 * np.eye(3)
    misfit = log_y @ np.linalg.solve(covariance, log_y)
    expected = -(misfit + np.log(np.linalg.det(covariance))) / 2
    fitted = fit(problem)
    assert fitted.log_evidence == pytest.approx(expected)
    share = 3 * spread**2 / (3 * spread**2 + sd**2)
    assert fitted.log_y == pytest.approx(np.full(3, share * log_y.mean()))


def test_a_bound_that_holds_is_no_evidence() -> None:
    held = [fit(_reading(y, 0.1, at_least=True)).log_evidence for y in (0.1, 0.5)]
    assert held == pytest.approx([0.0, 0.0], abs=1e-6)
    assert fit(_reading(3.0, 0.1, at_least=True)).log_evidence < -0.1
