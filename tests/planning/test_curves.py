"""Lines of all variants, learned together from points."""

from __future__ import annotations

import numpy as np
import pytest
from autofit.planning.curves import Departures, LineDraws, LineFamily, Point, spread_of
from autofit.planning.least_squares import Array

from autofit.plan import Dimension, Scalar
from autofit.planning.constants import LEAST_SPREAD, LinePrior

DIMENSIONS = {"dtype": Dimension(("plain", "half", "other")), "level": Dimension((0, 1, 2, 3))}
VARIANTS = [{"dtype": d, "level": n} for d in ("plain", "half", "other") for n in range(4)]


def _family(
    hints: dict[tuple[str, Scalar], float] | None = None,
    lines: dict[int, tuple[float, float]] | None = None,
) -> LineFamily:
    return LineFamily(VARIANTS, DIMENSIONS, LinePrior(), slope_hints=hints, lines=lines)


def _truth(variant: int, x: float) -> float:
    settings = VARIANTS[variant]
    slope = 2.0 * {"plain": 1.0, "half": 0.5, "other": 0.7}[str(settings["dtype"])]
    return 10.0 + slope * (1 - 0.1 * int(settings["level"])) * x


def _points(*where: tuple[int, float]) -> list[Point]:
    return [Point(variant, x, _truth(variant, x), 0.01) for variant, x in where]


def _ends(draws: LineDraws, variant: int, x: float) -> tuple[float, float]:
    low, high = np.quantile(draws.value_at(x)[:, variant], [0.05, 0.95])
    return float(low), float(high)


def test_every_draw_agrees_with_the_points() -> None:
    points = _points((0, 1), (0, 8), (5, 4), (11, 16))
    draws = _family().draws(points, 200, seed=0)
    for point in points:
        values = draws.value_at(point.x)[:, point.variant]
        assert np.abs(np.log(values / point.y)).max() < 5 * point.error


def test_two_points_determine_a_line_beyond_them() -> None:
    draws = _family().draws(_points((0, 1), (0, 8)), 200, seed=0)
    low, high = _ends(draws, 0, 32.0)
    assert low < _truth(0, 32) < high
    assert high / low < 1.2


def test_one_point_leaves_the_slope_open_within_the_limits_of_a_line() -> None:
    draws = _family().draws(_points((0, 4)), 200, seed=0)
    far = draws.value_at(16.0)[:, 0] / _truth(0, 4)
    assert far.min() > 0.9
    assert far.max() < 4.3
    assert far.max() / far.min() > 2


def test_a_variant_borrows_from_those_that_share_its_settings() -> None:
    half_at_2 = 6
    unknown = _family().draws(_points((0, 1), (0, 16)), 300, seed=0)
    shared = _points((0, 1), (0, 16), (2, 16), (4, 16))
    known = _family().draws(shared, 300, seed=0)
    before, after = _ends(unknown, half_at_2, 16), _ends(known, half_at_2, 16)
    assert after[1] - after[0] < 0.35 * (before[1] - before[0])
    assert after[0] < _truth(half_at_2, 16) < after[1]


def test_a_hint_narrows_an_unmeasured_line() -> None:
    points = _points((0, 1), (0, 16))
    without = _family().draws(points, 300, seed=0)
    with_hint = _family(hints={("dtype", "half"): 0.5}).draws(points, 300, seed=0)
    wide, narrow = _ends(without, 4, 16), _ends(with_hint, 4, 16)
    assert narrow[1] - narrow[0] < 0.5 * (wide[1] - wide[0])
    assert narrow[0] < _truth(4, 16) < narrow[1]


def test_a_wrong_hint_is_overruled_by_a_measurement() -> None:
    draws = _family(hints={("dtype", "half"): 2.0}).draws(
        _points((0, 1), (0, 16), (4, 8), (4, 32)), 200, seed=0
    )
    assert np.median(draws.value_at(64.0)[:, 4]) == pytest.approx(_truth(4, 64), rel=0.1)


def test_an_oom_is_a_lower_bound() -> None:
    measured = _points((0, 1), (0, 2))
    open_end = _family().draws(measured, 300, seed=0)
    bounded = _family().draws([*measured, Point(4, 8, 40.0, 0.01, at_least=True)], 300, seed=0)
    assert np.quantile(bounded.value_at(8.0)[:, 4], 0.02) > 38
    assert np.quantile(open_end.value_at(8.0)[:, 4], 0.5) < 38


def test_predicted_lines_hold_until_measurements_differ() -> None:
    lines = {i: (_truth(i, 0), _truth(i, 1) - _truth(i, 0)) for i in range(len(VARIANTS))}
    family = _family(lines=lines)
    before = family.draws([], 300, seed=0)
    assert np.median(before.value_at(16.0)[:, 6]) == pytest.approx(_truth(6, 16), rel=0.1)
    larger = [Point(i, x, 1.3 * _truth(i, x), 0.01) for i, x in ((0, 1), (0, 16))]
    after = family.draws(larger, 300, seed=0)
    assert np.median(after.value_at(16.0)[:, 0]) == pytest.approx(1.3 * _truth(0, 16), rel=0.02)


def test_x_at_is_where_the_line_has_the_value() -> None:
    lines = np.log([[10.0, 10.0]]), np.log([[2.0, 0.5]])
    draws = LineDraws(*lines)
    assert draws.x_at(30.0) == pytest.approx(np.array([[10.0, 40.0]]))
    assert draws.x_at(5.0).max() < 0


def test_without_dimensions_there_is_one_line() -> None:
    family = LineFamily([{}], {}, LinePrior())
    draws = family.draws([Point(0, 1, 3.0, 0.01), Point(0, 5, 7.0, 0.01)], 100, seed=0)
    assert np.median(draws.value_at(9.0)) == pytest.approx(11.0, rel=0.05)


# -- Departures of step times from their lines

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
