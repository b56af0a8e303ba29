"""The figure of scaling is drawn from the newest recorded numbers."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmarks.scaling_figure import PANELS, Scale, drawn, figure_of, newest

SVG = "{http://www.w3.org/2000/svg}"


def test_the_figure_is_that_of_the_newest_numbers() -> None:
    told = json.loads(newest().read_text())
    told_by = figure_of(newest()).read_text()
    assert told_by == drawn(told), "run python -m benchmarks.scaling_figure"


def test_every_number_is_a_point_and_a_larger_one_is_higher() -> None:
    told = json.loads(newest().read_text())
    panels = ElementTree.fromstring(drawn(told)).findall(f"{SVG}g")
    assert len(panels) == len(PANELS)
    for panel, group in zip(PANELS, panels, strict=True):
        points = group.findall(f"{SVG}circle")
        rows = told[panel.rows]
        seconds = [row[column] for column in panel.curves for row in rows]
        heights = [-float(point.attrib["cy"]) for point in points]
        assert len(heights) == len(seconds)
        by_seconds = sorted(range(len(seconds)), key=seconds.__getitem__)
        in_order = [heights[index] for index in by_seconds]
        assert in_order == sorted(in_order)


def test_an_axis_has_a_tenfold_in_each_decade() -> None:
    scale = Scale.over([0.2, 300.0], start=0.0, end=400.0)
    assert [label for _, label in scale.decades()] == ["0.1", "1", "10", "100", "1000"]
    assert scale.at(10.0) - scale.at(1.0) == pytest.approx(100.0)
