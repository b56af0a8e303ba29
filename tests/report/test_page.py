"""The page of a report: in any browser the numbers of the JSON, and nothing from elsewhere.

`tiny_resnet.json` is what a search of benchmarks/workloads.py:tiny_resnet on a CPU wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Dimension
from autofit.report.charts import charts
from autofit.report.memory_charts import memory_charts
from autofit.report.page import page
from autofit.report.record import Record, SearchSummary
from autofit.report.report import load
from autofit.units import GIB, KIB, MIB
from tests import browser as browsers

REPORT = Path(__file__).parent / "tiny_resnet.json"
HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"
UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB}

in_a_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(browsers.CHROMIUM is None, reason="Chromium is not installed"),
]


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text without scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
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
            self.text += data


def figures_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.S)
    assert found is not None
    figures: dict[str, Any] = json.loads(found[1])
    return figures


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
        trials=(*trials, Trial(999, Role.SEARCH, measured.trials[0].plan, failed)),
        environment={**measured.environment, "gpu": HOSTILE, "driver": HOSTILE},
        notes=(HOSTILE,),
        paste={best.number: [HOSTILE]},
        search=replace(measured.search, stopped_because=HOSTILE),
        memory={**measured.memory, "best": {**use, "modules": modules}},
    )


def test_nothing_is_loaded_from_elsewhere_and_only_our_scripts_may_run(measured: Record) -> None:
    found = Elements(page(measured)).found
    for tag, attributes in found:
        assert not {"src", "href", "srcset", "data", "action"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] for tag, a in found if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy
    assert "unsafe-eval" not in policy
    assert re.search(r"script-src[^;]*unsafe", policy) is None


def test_each_plotted_number_is_the_reports(measured: Record) -> None:
    report = json.loads(REPORT.read_text())
    by_number = {trial["number"]: trial for trial in report["trials"]}
    drawn = {chart.name: chart.figure for chart in (*charts(measured), *memory_charts(measured))}
    unit = UNITS[drawn["course"]["layout"]["yaxis2"]["title"]["text"].split()[-1]]
    plotted: set[int] = set()
    for trace in drawn["course"]["data"]:
        if trace["type"] != "bar":
            continue
        for number, height in zip(trace["x"], trace["y"], strict=True):
            trial = by_number[number]
            assert height * unit == trial["peak_reserved_bytes"] + trial["non_torch_bytes"]
            plotted.add(number)
    assert plotted == set(by_number)
    speeds = {
        number: y
        for trace in drawn["course"]["data"]
        if trace["type"] == "scatter" and trace["mode"] == "markers" and "yaxis" not in trace
        for number, y in zip(trace["x"], trace["y"], strict=True)
    }
    assert speeds == {number: each["samples_per_second"] for number, each in by_number.items()}
    for key, use in report["memory"].items():
        timeline = drawn[f"timeline_{key}"]
        unit = UNITS[timeline["layout"]["yaxis"]["title"]["text"].split()[-1]]
        kinds = {trace["name"].replace(" ", "_"): trace["y"] for trace in timeline["data"]}
        for kind, held in use["bytes"].items():
            assert [y * unit for y in kinds.get(kind, [0] * len(held))] == held


def test_the_words_are_complete_without_scripts(measured: Record) -> None:
    words = Elements(page(measured)).text
    report = json.loads(REPORT.read_text())
    for kept in (
        *report["notes"],
        *report["best"]["paste"],
        *(each["why"] for each in report["skipped"]),
        report["search"]["stopped_because"],
        report["environment"]["torch"],
        report["workload"]["fingerprint"],
        "report.apply(model, optimizer)",
    ):
        assert kept in words


def test_hostile_names_are_text(hostile: Record) -> None:
    html = page(hostile)
    ours = Elements(page(load(REPORT).record)).found
    found = Elements(html)
    assert {tag for tag, _ in found.found} <= {tag for tag, _ in ours} | {"li"}
    assert sum(tag == "script" for tag, _ in found.found) == 3
    assert found.text.count("window.ran = 1") >= 5
    assert "</script><" not in json.dumps(figures_of(html)).replace("&lt;", "")


def test_a_record_of_little_is_drawn_too(record: Record) -> None:
    """One trial, no memory use, nothing skipped; and one with every kind of failure."""
    first = record.trials[0]
    small = replace(
        record,
        trials=(first,),
        best_number=0,
        skipped=(),
        notes=(),
        paste={},
        difference=None,
        dimensions={"folding.level": Dimension([0, 1])},
        search=SearchSummary(1, 0, 1.0, "interrupted", 0, comparison_ended=False),
    )
    for each in (small, record):
        assert "All " in Elements(page(each)).text
        assert figures_of(page(each)).keys() >= {"frontier", "course"}
        assert ("micro_batch" in figures_of(page(each))) is (each is record), "of one size alone"


def test_a_budget_far_beyond_all_plans_does_not_squeeze_them(record: Record) -> None:
    wide = next(iter(charts(replace(record, vram_budget_bytes=2**40))))
    assert wide.figure["layout"]["xaxis"]["range"][1] < 100
    assert "1.00 TiB" in wide.figure["layout"]["annotations"][0]["text"]


@pytest.mark.parametrize("budget", ["as it was", 2**40])
def test_what_did_not_fit_is_never_drawn_inside_the_budget(record: Record, budget: Any) -> None:
    """An out-of-memory trial held less than the budget when it was refused the rest."""
    wide = budget == 2**40
    budget = budget if wide else record.vram_budget_bytes
    failed = [t for t in record.trials if t.measurement.outcome is Outcome.OOM]
    held = replace(failed[0].measurement, peak_reserved_bytes=MIB, non_torch_bytes=0)
    trials = tuple(replace(t, measurement=held) if t in failed else t for t in record.trials)
    drawn = {
        chart.name: chart.figure
        for chart in charts(replace(record, trials=trials, vram_budget_bytes=budget))
    }
    for name, axis, of_bytes in (("frontier", "x", "xaxis"), ("course", "y", "yaxis2")):
        layout = drawn[name]["layout"][of_bytes]
        unit, end = UNITS[layout["title"]["text"].split()[-1]], layout["range"][1]
        at = [
            trace[axis][trace["hovertext"].index(text)]
            for trace in drawn[name]["data"]
            for text in trace.get("hovertext", ())
            if f"trial {failed[0].number}," in text
            and (axis == "x" or trace.get("yaxis") == "y2")
            and trace["marker"].get("symbol") != "line-ew-open"  # what was expected of it
        ]
        assert at == [end if wide else budget / unit]


def test_utilization_is_shown_where_it_is_known(record: Record) -> None:
    trials = tuple(
        replace(trial, measurement=replace(trial.measurement, busy_percent=percent))
        for trial, percent in zip(
            record.trials, (97, None, None, 88, None, 0, 99, 100), strict=True
        )
    )
    course = {chart.name: chart for chart in charts(replace(record, trials=trials))}["course"]
    busy = next(each for each in course.figure["data"] if each["name"] == "GPU busy")
    assert list(zip(busy["x"], busy["y"], strict=True)) == [
        (0, 97), (3, 88), (5, 0), (6, 99), (7, 100)
    ]  # fmt: skip
    assert "kernels ran" in course.caption
    plain = {chart.name: chart for chart in charts(record)}["course"]
    assert "yaxis3" not in plain.figure["layout"]
    assert "kernels" not in plain.caption


def test_memory_that_could_not_be_looked_at_says_why(record: Record) -> None:
    memory = {"best": {"why_not": "the model is compiled"}}
    words = Elements(page(replace(record, memory=memory))).text
    assert "The memory of the best plan is not shown: the model is compiled" in words


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

    @pytest.mark.parametrize("width", [1280, 390])
    def test_every_chart_is_drawn_without_a_complaint(
        self, browser: Any, measured: Record, tmp_path: Path, width: int
    ) -> None:
        tab = opened(browser, measured, tmp_path, width=width)
        assert tab.complaints == []
        assert tab.requests == [(tmp_path / "report.html").as_uri()]
        plots, drawn = tab.run(
            "[document.querySelectorAll('.plot').length,"
            " [...document.querySelectorAll('.plot')].filter(plot =>"
            " plot.querySelector('.cartesianlayer .trace')).length]"
        )
        assert drawn == plots == len(figures_of(page(measured)))
        overflow = tab.run("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0  # nothing sticks out of a phone's screen

    def test_charts_follow_the_width_of_their_window(
        self, browser: Any, measured: Record, tmp_path: Path
    ) -> None:
        tab = opened(browser, measured, tmp_path)
        for width in (800, 390, 1280):
            tab.resize(width)
            unlike = tab.run(  # after a while: plotly.js waits for the last of several changes
                "new Promise(done => { let looks = 0; const look = () => {"
                " const unlike = [...document.querySelectorAll('.plot')].filter(plot =>"
                " Math.abs(plot._fullLayout.width - plot.clientWidth) > 1"
                " || plot.clientWidth > plot.parentElement.clientWidth);"
                " unlike.length && ++looks < 200 ? setTimeout(look, 50)"
                " : done(unlike.map(plot => plot.dataset.figure)); }; setTimeout(look, 300); })"
            )
            assert unlike == []
            assert tab.run("document.documentElement.scrollWidth - innerWidth") <= 0
        assert tab.complaints == []

    def test_the_browser_has_the_numbers_of_the_report(
        self, browser: Any, measured: Record, tmp_path: Path
    ) -> None:
        tab = opened(browser, measured, tmp_path)
        given = figures_of(page(measured))
        for name, figure in given.items():
            data = tab.run(
                f"document.querySelector('[data-figure={name}]').data.map(t => [t.x, t.y])"
            )
            assert data == [[trace["x"], trace["y"]] for trace in figure["data"]]
        cells = tab.run(
            "[...document.querySelectorAll('.trials tbody tr')].map("
            "row => [...row.cells].map(cell => cell.dataset.value))"
        )
        trials = json.loads(REPORT.read_text())["trials"]
        for row, trial in zip(cells, trials, strict=True):
            assert int(row[0]) == trial["number"]
            assert float(row[5]) == trial["samples_per_second"]
            assert int(row[6]) == trial["peak_reserved_bytes"] + trial["non_torch_bytes"]

    def test_the_table_sorts_and_filters(
        self, browser: Any, record: Record, tmp_path: Path
    ) -> None:
        tab = opened(browser, record, tmp_path)
        shown = (
            "[...document.querySelectorAll('.trials tbody tr')].filter(row => !row.hidden)"
            ".map(row => row.cells[0].textContent)"
        )
        click = "document.querySelectorAll('.trials thead button')[{}].click()"
        assert tab.run(shown) == list("01234567")
        tab.run(click.format(5))  # samples/s; the unknown last, whichever way
        assert tab.run(shown) == list("07536124")
        tab.run(click.format(5))
        assert tab.run(shown)[:5] == list("63507")
        assert set(tab.run(shown)[5:]) == set("124")
        tab.run(click.format(0))
        tab.run(
            "(() => { const box = document.getElementById('filter-words');"
            " box.value = 'confirmed folding'; box.dispatchEvent(new Event('input')); })()"
        )
        assert tab.run(shown) == ["6"]
        assert tab.run("document.getElementById('filter-count').textContent") == "1 of 8"
        tab.run(
            "(() => { const box = document.getElementById('filter-words'); box.value = '';"
            " const kind = document.getElementById('filter-outcome'); kind.value = 'oom';"
            " kind.dispatchEvent(new Event('change')); })()"
        )
        assert tab.run(shown) == ["1"]
        assert tab.complaints == []

    def test_hostile_names_are_shown_and_do_not_run(
        self, browser: Any, hostile: Record, tmp_path: Path
    ) -> None:
        tab = opened(browser, hostile, tmp_path)
        assert tab.run("typeof window.ran") == "undefined"
        assert tab.complaints == []
        words = tab.run("document.querySelector('main').innerText")
        assert words.count("<script>window.ran = 1</script>") >= 5
        label = "document.querySelector('[data-figure=modules_best] .annotation-text').textContent"
        assert "<script>window.ran = 1</script>" in tab.run(label)
        assert tab.run("document.querySelectorAll('main img, main script').length") == 0

    def test_paper_gets_every_chart_at_its_width(
        self, browser: Any, measured: Record, tmp_path: Path
    ) -> None:
        tab = opened(browser, measured, tmp_path)
        tab.print(tmp_path / "report.pdf")
        assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
        assert tab.complaints == []
        widths = tab.run(
            "new Promise(done => { dispatchEvent(new Event('beforeprint')); setTimeout(() => done("
            "[...document.querySelectorAll('.plot')].map(plot => plot._fullLayout.width)), 500); })"
        )
        assert set(widths) == {660}
