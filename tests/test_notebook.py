"""What notebooks show: the words of the text form, and nothing that a browser would run."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import torch

import autofit
from autofit.notebook import shown
from autofit.report.report import load
from autofit.units import format_bytes

REPORT = Path(__file__).parent / "report" / "tiny_resnet.json"


class Words(HTMLParser):
    """The texts and the elements of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_what_a_text_contains_is_shown() -> None:
    hostile = "<script>alert('x')</script> & \"more\""
    words = Words(shown([hostile, hostile], [("a", hostile)], [hostile]))
    assert words.texts.count(hostile) == 4
    assert words.elements == {"div", "p", "table", "tr", "td", "pre"}


def test_a_report_shows_its_answer_and_both_plans() -> None:
    report = load(REPORT)
    words = Words(report._repr_html_())
    assert words.texts[0] == report.to_text(width=1000).splitlines()[0]
    assert format_bytes(report.best.measurement.peak_reserved_bytes) in words.texts
    assert any("report.apply(model, optimizer)" in text for text in words.texts)


def test_a_prediction_and_a_verdict_show_their_rows() -> None:
    workload = autofit.Workload(lambda: torch.nn.Linear(8, 4), torch.randn(4, 8))
    prediction = autofit.predict(workload, gpu="L4")
    words = Words(prediction._repr_html_())
    assert words.texts[0] == f"{prediction.plan} on L4"
    assert format_bytes(prediction.peak_reserved_bytes) in words.texts
    verdict = autofit.check(workload, gpu="L4", vram_budget="1GiB")
    words = Words(verdict._repr_html_())
    assert words.texts[0] == str(verdict)
    assert format_bytes(verdict.required_bytes) in words.texts
