"""The forms of a verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from autofit.plan import Plan
from autofit.units import GIB
from autofit.verdict import Verdict

PARTS = {"weights": 2 * GIB, "optimizer_state": 4 * GIB, "non_torch": GIB // 2}
FITS = Verdict(True, Plan(8), "predict", 24 * GIB, 20 * GIB, GIB, PARTS)
LARGE = Verdict(False, Plan(16), "predict", 24 * GIB, 30 * GIB, GIB, PARTS, 11)
RAN = Verdict(True, Plan(8), "probe", 24 * GIB, 20 * GIB)
UNKNOWN = Verdict(None, Plan(8), "predict", 24 * GIB, detail="loss.item() in train.py:3")


def test_one_line() -> None:
    assert str(FITS) == "8 x 1 fits in 24.0 GiB: 20.0 GiB predicted + 1.00 GiB margin"
    assert str(RAN) == "8 x 1 fits in 24.0 GiB: 20.0 GiB measured"
    assert str(LARGE).endswith("the largest micro-batch that fits is 11")
    assert str(UNKNOWN) == "8 x 1 could not be told in 24.0 GiB: loss.item() in train.py:3"


@pytest.mark.parametrize(("verdict", "code"), [(FITS, 0), (LARGE, 1), (UNKNOWN, 5)])
def test_exit_codes(verdict: Verdict, code: int) -> None:
    assert verdict.exit_code == code


def test_headroom_and_growth() -> None:
    assert FITS.headroom_bytes == 4 * GIB
    assert LARGE.headroom_bytes == -6 * GIB
    assert UNKNOWN.headroom_bytes is None
    assert FITS.growth_since(16 * GIB) == pytest.approx(0.25)
    assert UNKNOWN.growth_since(16 * GIB) is None


def test_the_explanation_has_every_part() -> None:
    lines = LARGE.explain().splitlines()
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "required",
        "margin",
        "allowed",
        "weights",
        "optimizer state",
        "non torch",
    ]


def test_markdown_is_a_table() -> None:
    text = LARGE.to_markdown()
    assert text.startswith("### 16 x 1 does not fit")
    assert "| required | 30.0 GiB |" in text


@pytest.mark.parametrize(
    ("verdict", "child"), [(FITS, None), (LARGE, "failure"), (UNKNOWN, "skipped")]
)
def test_junit_xml(verdict: Verdict, child: str | None) -> None:
    suite = ElementTree.fromstring(verdict.to_junit_xml("fits 24 GiB"))
    (case,) = suite.findall("testcase")
    assert case.get("name") == "fits 24 GiB"
    assert [element.tag for element in case] == ([child] if child else [])
    if child:
        assert case[0].get("message") == str(verdict)


def test_json() -> None:
    data = json.loads(json.dumps(LARGE.to_dict()))
    assert data["fits"] is False
    assert data["headroom_bytes"] == -6 * GIB
    assert data["plan"]["micro_batch"] == 16
    assert {"required_bytes", "method", "largest_micro_batch", "breakdown"} <= data.keys()


def test_it_needs_no_torch() -> None:
    code = "import sys, autofit.verdict; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
