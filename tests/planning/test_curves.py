"""Lines of all variants, learned together from points."""

from __future__ import annotations

import numpy as np
import pytest

from autofit.plan import Dimension, Scalar
from autofit.planning.curves import LineFamily, Point, Spread, Worlds

DIMENSIONS = {"dtype": Dimension(("plain", "half", "other")), "level": Dimension((0, 1, 2, 3))}
VARIANTS = [{"dtype": d, "level": n} for d in ("plain", "half", "other") for n in range(4)]


def _family(
    hints: dict[tuple[str, Scalar], float] | None = None,
    lines: dict[int, tuple[float, float]] | None = None,
) -> LineFamily:
    return LineFamily(VARIANTS, DIMENSIONS, Spread(), hints or {}, lines or {})


def _truth(variant: int, x: float) -> float:
    settings = VARIANTS[variant]
    slope = 2.0 * {"plain": 1.0, "half": 0.5, "other": 0.7}[str(settings["dtype"])]
    return 10.0 + slope * (1 - 0.1 * int(settings["level"])) * x


def _points(*where: tuple[int, float]) -> list[Point]:
    return [Point(variant, x, _truth(variant, x), 0.01) for variant, x in where]


def _ends(worlds: Worlds, variant: int, x: float) -> tuple[float, float]:
    low, high = np.quantile(worlds.value(x)[:, variant], [0.05, 0.95])
    return float(low), float(high)


def test_every_world_agrees_with_the_points() -> None:
    points = _points((0, 1), (0, 8), (5, 4), (11, 16))
    worlds = _family().worlds(points, 200, seed=0)
    for point in points:
        values = worlds.value(point.x)[:, point.variant]
        assert np.abs(np.log(values / point.y)).max() < 5 * point.error


def test_two_points_tell_a_line_beyond_them() -> None:
    worlds = _family().worlds(_points((0, 1), (0, 8)), 200, seed=0)
    low, high = _ends(worlds, 0, 32.0)
    assert low < _truth(0, 32) < high
    assert high / low < 1.2


def test_one_point_leaves_open_how_it_goes_on_within_what_a_line_can() -> None:
    worlds = _family().worlds(_points((0, 4)), 200, seed=0)
    far = worlds.value(16.0)[:, 0] / _truth(0, 4)
    assert far.min() > 0.9
    assert far.max() < 4.3
    assert far.max() / far.min() > 2


def test_a_variant_borrows_from_those_that_share_its_settings() -> None:
    half_at_2 = 6
    unknown = _family().worlds(_points((0, 1), (0, 16)), 300, seed=0)
    shared = _points((0, 1), (0, 16), (2, 16), (4, 16))
    known = _family().worlds(shared, 300, seed=0)
    before, after = _ends(unknown, half_at_2, 16), _ends(known, half_at_2, 16)
    assert after[1] - after[0] < 0.35 * (before[1] - before[0])
    assert after[0] < _truth(half_at_2, 16) < after[1]


def test_a_hint_narrows_what_was_never_measured() -> None:
    points = _points((0, 1), (0, 16))
    without = _family().worlds(points, 300, seed=0)
    with_hint = _family(hints={("dtype", "half"): 0.5}).worlds(points, 300, seed=0)
    wide, narrow = _ends(without, 4, 16), _ends(with_hint, 4, 16)
    assert narrow[1] - narrow[0] < 0.5 * (wide[1] - wide[0])
    assert narrow[0] < _truth(4, 16) < narrow[1]


def test_a_wrong_hint_is_overruled_by_a_measurement() -> None:
    worlds = _family(hints={("dtype", "half"): 2.0}).worlds(
        _points((0, 1), (0, 16), (4, 8), (4, 32)), 200, seed=0
    )
    assert np.median(worlds.value(64.0)[:, 4]) == pytest.approx(_truth(4, 64), rel=0.1)


def test_running_out_of_memory_only_bounds_from_below() -> None:
    measured = _points((0, 1), (0, 2))
    open_end = _family().worlds(measured, 300, seed=0)
    bounded = _family().worlds([*measured, Point(4, 8, 40.0, 0.01, at_least=True)], 300, seed=0)
    assert np.quantile(bounded.value(8.0)[:, 4], 0.02) > 38
    assert np.quantile(open_end.value(8.0)[:, 4], 0.5) < 38


def test_predicted_lines_are_believed_until_measured_otherwise() -> None:
    lines = {i: (_truth(i, 0), _truth(i, 1) - _truth(i, 0)) for i in range(len(VARIANTS))}
    family = _family(lines=lines)
    before = family.worlds([], 300, seed=0)
    assert np.median(before.value(16.0)[:, 6]) == pytest.approx(_truth(6, 16), rel=0.1)
    larger = [Point(i, x, 1.3 * _truth(i, x), 0.01) for i, x in ((0, 1), (0, 16))]
    after = family.worlds(larger, 300, seed=0)
    assert np.median(after.value(16.0)[:, 0]) == pytest.approx(1.3 * _truth(0, 16), rel=0.02)


def test_the_same_arguments_give_the_same_worlds() -> None:
    first, again = (_family().worlds(_points((0, 1)), 20, seed=7) for _ in range(2))
    assert np.array_equal(first.slope, again.slope)
    assert not np.array_equal(first.slope, _family().worlds(_points((0, 1)), 20, seed=8).slope)


def test_reach_is_where_the_line_meets_the_value() -> None:
    worlds = Worlds(np.log([[10.0, 10.0]]), np.log([[2.0, 0.5]]))
    assert worlds.reach(30.0) == pytest.approx(np.array([[10.0, 40.0]]))
    assert worlds.reach(5.0).max() < 0


def test_without_dimensions_there_is_one_line() -> None:
    family = LineFamily([{}], {}, Spread(), {}, {})
    worlds = family.worlds([Point(0, 1, 3.0, 0.01), Point(0, 5, 7.0, 0.01)], 100, seed=0)
    assert np.median(worlds.value(9.0)) == pytest.approx(11.0, rel=0.05)
