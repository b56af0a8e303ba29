"""The page of a report: in any browser the numbers of the JSON, and nothing from elsewhere.

`tiny_resnet.json` is what a search of benchmarks/workloads.py:tiny_resnet on a CPU wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Dimension
from autofit.report.details import trial_of
from autofit.report.page import cell, page
from autofit.report.record import Record, SearchSummary
from autofit.report.report import load
from autofit.report.summary import name_of
from autofit.units import MIB, format_bytes
from tests import browser as browsers

REPORT = Path(__file__).parent / "tiny_resnet.json"
HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"

in_a_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(browsers.CHROMIUM is None, reason="Chromium is not installed"),
]


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its texts without scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._inside.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] not in ("script", "style"):
            self.texts.append(data)


def points_of(html: str, kind: str) -> list[tuple[float, float, str]]:
    """Where points of that kind lie against memory: percent across, pixels down, what they say."""
    html = html.partition('aria-label="Speed against micro-batch"')[0]
    found = re.findall(
        rf'<(?:circle|rect) class="{kind}(?: value-[\d\w]+)?" c?x="([\d.]+)%" c?y="([\d.]+)"[^>]*>'
        r"<title>(.*?)</title>",
        html,
        re.DOTALL,
    )
    return [(float(x), float(y), said) for x, y, said in found]


def budget_of(html: str) -> float:
    """Where the budget stands, in percent."""
    found: Any = re.search(r'<line class="budget" x1="([\d.]+)%"', html)
    return float(found[1])


def test_a_plot_is_an_svg_document_with_each_plan(tmp_path: Path) -> None:
    report = load(REPORT)
    drawn = ElementTree.fromstring(report.save(tmp_path / "frontier.svg").read_text())
    marks = [each for each in drawn.iter() if each.find("{*}title") is not None]
    assert len(marks) == len({trial.plan for trial in report.trials if trial.ok})
    assert {each.tag.rpartition("}")[2] for each in marks} == {"circle", "rect"}
    assert "best" in {text.text for text in drawn.iterfind(".//{*}text")}
    assert report.plot()._repr_svg_() == (tmp_path / "frontier.svg").read_text()


@pytest.fixture(scope="module")
def measured() -> Record:
    return load(REPORT).record


@pytest.fixture(scope="module")
def hostile(measured: Record) -> Record:
    """The record with names of which each would run if it were put into the page as it is."""
    best, use = measured.best, measured.memory["best"]
    modules = [{**part, "class": HOSTILE, "name": HOSTILE} for part in use["modules"]]
    settings = {**best.plan.settings, "memory_format.layout": HOSTILE}
    plan = replace(best.plan, settings=settings)
    trials = tuple(
        replace(trial, plan=plan) if trial.plan == best.plan else trial for trial in measured.trials
    )
    failed = Measurement(Outcome.UNSUPPORTED, HOSTILE)
    return replace(
        measured,
        trials=(*trials, Trial(999, TrialKind.SEARCH, measured.trials[0].plan, failed)),
        environment={**measured.environment, "gpu": HOSTILE, "driver": HOSTILE},
        notes=(HOSTILE,),
        paste={best.number: [HOSTILE]},
        search=replace(measured.search, stopped_because=HOSTILE),
        memory={**measured.memory, "best": {**use, "modules": modules}},
    )


def test_nothing_is_loaded_from_elsewhere_and_no_script_may_run(measured: Record) -> None:
    found = Elements(page(measured)).found
    for tag, attributes in found:
        assert not {"src", "href", "srcset", "data", "action"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] for tag, a in found if a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "script" not in {tag for tag, _ in found}


def test_each_plan_that_ran_is_drawn_where_its_numbers_are(measured: Record) -> None:
    near = replace(measured, vram_budget_bytes=16 * MIB)
    html = page(near)
    (best,), (baseline,) = points_of(html, "best"), points_of(html, "baseline")
    plans = {trial.plan for trial in measured.trials if trial.ok}
    assert len(points_of(html, "tried")) + 2 == len(plans)
    held, theirs = (
        trial.measurement.held_bytes or 0
        for trial in (measured.best, measured.baseline_beside_best)
    )
    assert best[0] / baseline[0] == pytest.approx(held / theirs, abs=0.01)
    assert best[0] / budget_of(html) == pytest.approx(held / near.vram_budget_bytes, abs=0.01)
    assert best[1] < baseline[1], "the faster one is higher"
    assert f"trial {measured.turns(measured.best.plan)[-1].number}: ok" in best[2]


def test_the_memory_over_a_step_is_the_reports(measured: Record) -> None:
    for key, use in measured.memory.items():
        name = name_of(trial_of(key, measured).plan, measured)
        _, _, chart = page(measured).partition(f'aria-label="Memory over a step: {name}"')
        chart = chart.partition("</section>")[0]
        peak = max(map(sum, zip(*use["bytes"].values(), strict=True)))
        assert f"peak {format_bytes(peak)}" in chart
        drawn = set(re.findall(r'<path class="kind-(\w+)"', chart))
        assert drawn == {kind for kind, held in use["bytes"].items() if any(held)}


def test_hostile_names_are_text(hostile: Record) -> None:
    ours = Elements(page(load(REPORT).record)).found
    found = Elements(page(hostile))
    assert {tag for tag, _ in found.found} <= {tag for tag, _ in ours} | {"li", "p"}
    assert "".join(found.texts).count("window.ran = 1") >= 5


def test_a_notebook_has_the_whole_page_in_a_frame_in_which_nothing_runs(hostile: Record) -> None:
    shown = Elements(cell(hostile)).found
    (frame,) = [attributes for tag, attributes in shown if tag == "iframe"]
    assert frame["srcdoc"] == page(hostile)
    assert "sandbox" in frame
    assert "script" not in {tag for tag, _ in shown}


@pytest.mark.parametrize("trials", [1, 8])
def test_a_record_of_little_is_drawn_too(record: Record, trials: int) -> None:
    """One trial, no memory use, nothing skipped; and one with every kind of failure."""
    little: dict[str, Any] = {
        "trials": record.trials[:1], "best_number": 0, "recommended_number": 0, "skipped": (),
        "notes": (), "paste": {}, "difference": None,
        "dimensions": {"folding.level": Dimension([0, 1])},
        "search": SearchSummary(1, 0, 1.0, "interrupted", 0, comparison_ended=False),
    }  # fmt: skip
    html = page(replace(record, **(little if trials == 1 else {})))
    assert len(points_of(html, "best")) == 1
    table = html.partition('class="long trials"')[2].partition("</section>")[0]
    assert table.count("<tr>") == 1 + trials, "and the titles"


def test_what_fits_is_drawn_inside_the_budget_and_what_does_not_is_counted(record: Record) -> None:
    many = tuple(replace(record.trials[1], number=20 + number) for number in range(40))
    html = page(replace(record, trials=(*record.trials, *many)))
    assert "41 did not fit" in html
    fits = [*points_of(html, "tried"), *points_of(html, "best"), *points_of(html, "baseline")]
    assert max(x for x, _, _ in fits) < budget_of(html)
    far = page(replace(record, vram_budget_bytes=2**40))
    assert 'class="budget"' not in far
    assert "VRAM budget 1.00 TiB" in far


@pytest.mark.parametrize(("comparison_ended", "numbers"), [(True, "6|11"), (False, "3|8")])
def test_a_comparison_that_did_not_end_counts_as_its_probes_do(
    record: Record, comparison_ended: bool, numbers: str
) -> None:
    """A plan that two probes measured at 156 and 73 samples/s is not drawn at the later one."""
    first, last = record.trials[3], record.trials[6]
    slow = replace(last, measurement=replace(last.measurement, step_times_s=[0.8, 0.8, 0.8]))
    trials = (*record.trials[:6], slow, record.trials[7], replace(first, number=8))
    search = replace(record.search, comparison_ended=comparison_ended)
    given = replace(record, trials=trials, search=search)
    (drawn,) = points_of(page(given), "best")
    assert re.search(f"trial ({numbers}):", drawn[2])
    assert f'class="frontier{"" if comparison_ended else " undecided"}"' in page(given)


def test_each_point_has_the_range_of_its_speed(measured: Record) -> None:
    html = page(measured)
    lines = re.findall(r'class="whisker" x1="([\d.]+)%".* y1="([\d.]+)" y2="([\d.]+)"', html)
    found = [tuple(map(float, line)) for line in lines]
    points = [point for kind in ("tried", "best", "baseline") for point in points_of(html, kind)]
    assert len(lines) == len(points)
    for x, y, _ in points:
        assert any(at == x and low >= y - 0.1 and y >= high - 0.1 for at, low, high in found)


def test_what_is_folded_is_printed(measured: Record) -> None:
    html = page(measured)
    printed = html.partition("@media print")[2]
    assert html.count("<details>") > 3
    assert re.search(r"details::details-content \{ content-visibility: visible", printed)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsers.opened() as tab:
        yield tab


def opened(browser: Any, record: Record, folder: Path, *, width: int = 1280) -> Any:
    path = folder / "report.html"
    path.write_text(page(record))
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(path, width=width, phone=width < 500)
    return browser


class TestInABrowser:
    pytestmark = in_a_browser

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_it_fits_any_width_at_any_time_without_a_complaint(
        self, browser: Any, measured: Record, tmp_path: Path, scheme: str
    ) -> None:
        browser.prefer(scheme)
        tab = opened(browser, measured, tmp_path)
        for width in (1280, 800, 390, 320, 1280):
            tab.resize(width)
            assert tab.run("document.documentElement.scrollWidth - innerWidth") <= 0, width
            cut = tab.run(  # a text of a chart that leaves its section
                "[...document.querySelectorAll('.chart text')].filter(text => {"
                " const box = text.getBoundingClientRect();"
                " const around = text.closest('section').getBoundingClientRect();"
                " return box.width && (box.left < around.left || box.right > around.right); })"
                ".map(text => text.textContent)"
            )
            assert cut == [], width
            empty = tab.run(
                "[...document.querySelectorAll('.chart')].filter(chart =>"
                " chart.clientWidth < 0.6 * chart.parentElement.clientWidth).length"
            )
            assert empty == 0, width
        assert tab.complaints == []
        assert tab.requests == [(tmp_path / "report.html").as_uri()]

    def test_folded_parts_are_printed(self, browser: Any, measured: Record, tmp_path: Path) -> None:
        tab = opened(browser, measured, tmp_path)

        shown = "[...document.querySelectorAll('details pre')].map(e => e.checkVisibility())"

        assert not any(tab.run(shown))
        tab.show_on("print")
        try:
            assert all(tab.run(shown))
        finally:
            tab.show_on("screen")

    def test_hostile_names_are_shown_and_do_not_run(
        self, browser: Any, hostile: Record, tmp_path: Path
    ) -> None:
        tab = opened(browser, hostile, tmp_path)
        assert tab.run("typeof window.ran") == "undefined"
        assert tab.complaints == []
        words = tab.run("document.querySelector('main').innerText")
        assert words.count("<script>window.ran = 1</script>") >= 5
        assert tab.run("document.querySelectorAll('main img, main script').length") == 0
