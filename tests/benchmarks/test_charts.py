"""The charts of docs/benchmarks.md, and the results that it shows."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from benchmarks.charts import CHARTS, FOLDER, drawn
from benchmarks.stated_numbers import RESULTS, ROOT


@pytest.mark.parametrize("name", sorted(CHARTS))
def test_a_chart_is_drawn_from_the_newest_results(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == CHARTS[name](), "python -m benchmarks.charts"


def test_bars_are_as_long_as_what_they_show() -> None:
    chart = ElementTree.fromstring(drawn("a < b", "", [("autofit", 2.0, "2"), ("c", 0.5, "0.5")]))
    first, second = (float(bar.attrib["width"]) for bar in chart.iter() if bar.tag.endswith("rect"))
    assert first == pytest.approx(4 * second)


def test_every_page_of_results_is_linked_from_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    linked = set(
        re.findall(r"benchmarks/results/([\w.-]+\.md)", "".join(p.read_text() for p in pages))
    )
    kept = {path.name for path in RESULTS.glob("*.md")}
    assert kept <= linked
    assert linked <= kept
    assert len(kept) <= 12


def test_the_page_of_benchmarks_names_every_file() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    files = [path for path in (ROOT / "benchmarks").iterdir() if path.name[0] not in "_."]
    names = {path.stem for path in files if path.suffix in (".py", ".sh") or path.is_dir()}
    assert [name for name in sorted(names) if name not in page] == []
