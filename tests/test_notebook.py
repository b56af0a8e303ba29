"""What notebooks show: the words of the text form, and nothing that a browser would run."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autofit
from autofit.notebook import shown
from autofit.report.report import load
from autofit.units import format_bytes
from tests.report.test_page import Elements

REPORT = Path(__file__).parent / "report" / "tiny_resnet.json"


def test_what_a_text_contains_is_shown() -> None:
    hostile = "<script>alert('x')</script> & \"more\""
    words = Elements(shown([hostile, hostile], [("a", hostile)], [hostile]))
    assert words.texts.count(hostile) == 4
    assert {tag for tag, _ in words.found} == {"div", "p", "table", "tr", "td", "pre"}


def test_a_report_shows_its_answer_and_both_plans() -> None:
    report = load(REPORT)
    words = Elements(report._repr_html_())
    text = report.to_text(width=400)
    assert words.texts[0] == text.splitlines()[0]
    assert all(" ".join(shown.split()) in " ".join(text.split()) for shown in words.texts[:12])
    assert any("report.apply(model, optimizer" in shown for shown in words.texts)


def test_a_prediction_and_a_verdict_show_their_rows() -> None:
    workload = autofit.Workload(lambda: torch.nn.Linear(8, 4), torch.randn(4, 8))
    prediction = autofit.predict(workload, gpu="L4")
    verdict = autofit.check(workload, gpu="L4", vram_budget="1GiB")
    for shown_one, title, size in (
        (prediction, str(prediction).splitlines()[0], prediction.peak_reserved_bytes),
        (verdict, str(verdict), verdict.required_bytes),
    ):
        words = Elements(shown_one._repr_html_())
        assert words.texts[0] == title
        assert format_bytes(size) in words.texts


class Notebook:
    """What a kernel's `IPython.display.display` is asked for: outputs by number, as they stand."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert (raw, display_id) == (True, True)
        states = [data["text/plain"]]
        self.outputs.append(states)
        return SimpleNamespace(update=lambda data, *, raw: states.append(data["text/plain"]))


class ZMQInteractiveShell:
    """By this name rich knows the shell of a notebook."""

    kernel = True


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made, shell = Notebook(), ZMQInteractiveShell()
    package: Any = SimpleNamespace(get_ipython=lambda: shell)
    display: Any = SimpleNamespace(display=made.display)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    return made


def test_a_reports_text_is_the_same_in_a_notebook(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def texts() -> list[str]:
        report = load(REPORT)
        saved = report.save(tmp_path / "report.txt").read_text()
        return [saved, str(report), report.to_text(), report.to_text(verbose=True)]

    plain = texts()
    assert plain[0] == plain[1] == plain[2]
    notebook = request.getfixturevalue("notebook")
    assert texts() == plain
    assert notebook.outputs == [], "it was displayed as well"


@pytest.mark.slow
def test_progress_in_a_notebook_is_one_line_that_changes(
    notebook: Notebook, capfd: pytest.CaptureFixture[str]
) -> None:
    workload = autofit.Workload(torch.nn.Linear(8, 4), torch.randn(4, 8))
    limits: Any = {"max_probes": 2, "vram_budget": "32MiB", "strategies": ["precision"]}
    autofit.search(workload, device="cpu", **limits)
    (states,) = notebook.outputs
    assert len(set(states)) > 3
    assert any("probe 2" in state for state in states)
    assert "samples/s" in states[-1]
    assert "probe" not in capfd.readouterr().err
