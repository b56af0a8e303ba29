"""The least-squares problem of lines through measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from autofit.planning.least_squares import Array, Readings, nearest

DRAWS = 50
PRIOR = np.random.default_rng(0).standard_normal((DRAWS, 3))


def _readings(
    log_y: Sequence[float],
    sd: float,
    *,
    at_least: bool = False,
) -> Readings:
    """One line without a slope to speak of: log y is the first weight.

    The second weight is a term of the slope, the third the line's own.
    """
    count = len(log_y)
    return Readings(
        starts=np.array([0]),
        x=np.ones(count),
        log_y=np.array(log_y),
        at_least=np.full(count, at_least),
        precision=np.full(count, sd**-2),
        mean_a=np.zeros(1),
        mean_b=np.full(1, -100.0),
        features_a=np.array([[1.0, 0.0]]),
        features_b=np.array([[0.0, 1.0]]),
        own=1.0,
    )


@pytest.mark.parametrize("sd", [0.01, 1.0, 3.0])
def test_a_linear_problem_has_the_textbook_solution(sd: float) -> None:
    """The mean of prior and reading, each weighted by the inverse of its variance."""
    weights = nearest(PRIOR, _readings([np.log(5.0)], sd), np.zeros((DRAWS, 1)))
    expected = (PRIOR[:, 0] * sd**2 + np.log(5.0)) / (sd**2 + 1)
    assert np.allclose(weights[:, 0], expected)
    assert np.allclose(weights[:, 1:], PRIOR[:, 1:])


def test_a_bound_moves_only_the_draws_below_it() -> None:
    weights = nearest(PRIOR, _readings([0.0], 1e-3, at_least=True), np.zeros((DRAWS, 1)))
    below = PRIOR[:, 0] < 0
    assert 0 < below.sum() < DRAWS
    assert np.allclose(weights[~below], PRIOR[~below])
    assert np.allclose(weights[below, 0], 0, atol=1e-5)


def test_several_lines_have_the_solution_of_the_whole_system() -> None:
    """What is found costs least: no change of one of all weights costs less."""
    random = np.random.default_rng(1)
    lines, terms, per_line = 4, 5, 3
    count = lines * per_line
    problem = Readings(
        starts=np.arange(0, count, per_line),
        x=np.exp(random.uniform(0, 3, count)),
        log_y=np.zeros(count),
        at_least=np.zeros(count, dtype=bool),
        precision=random.uniform(100, 400, count),
        mean_a=random.normal(size=lines),
        mean_b=random.normal(size=lines),
        features_a=random.normal(size=(lines, terms)),
        features_b=random.normal(size=(lines, terms)),
        own=0.5,
    )
    truth, prior = random.normal(size=(2, 1, terms + lines))
    value, _ = problem.predicted(truth)
    problem = replace(problem, log_y=value[0] + random.normal(0, 0.05, count))
    found = nearest(prior, problem, np.zeros((1, count)))

    def cost(weights: Array) -> float:
        value, _ = problem.predicted(weights)
        misfit = problem.precision * (problem.log_y - value) ** 2
        return float(((weights - prior) ** 2).sum() + misfit.sum())

    least = cost(found)
    assert least < 0.5 * cost(prior)
    for weight in np.eye(prior.shape[1]):
        for step in (-1e-3, 1e-3):
            assert cost(found + step * weight) > least


def test_far_from_the_solution_nothing_overflows_for_good() -> None:
    """The first step from so small a slope is far too long; it is shortened."""
    problem = replace(_readings([0.0, 20.0], 1e-3), x=np.exp([0.0, 1.0]))
    problem = replace(problem, features_b=np.array([[0.0, 30.0]]))
    weights = nearest(np.zeros((1, 3)), problem, np.zeros((1, 2)))
    assert np.isfinite(weights).all()
    value, _ = problem.predicted(weights)
    assert np.isfinite(value).all()
