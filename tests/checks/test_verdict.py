"""The forms of a verdict."""

from __future__ import annotations

from autofit.checks.verdict import Verdict, markdown
from autofit.plan import Plan
from autofit.units import GIB

PARTS = {"weights": 2 * GIB, "optimizer_state": 4 * GIB, "non_torch": GIB // 2}
FITS = Verdict(True, Plan(8), "predict", 24 * GIB, 20 * GIB, GIB, PARTS)
LARGE = Verdict(False, Plan(16), "predict", 24 * GIB, 30 * GIB, GIB, PARTS, 11)
UNKNOWN = Verdict(None, Plan(8), "predict", 24 * GIB, detail="loss.item() in train.py:3")


def test_headroom() -> None:
    assert FITS.headroom_bytes == 4 * GIB
    assert LARGE.headroom_bytes == -6 * GIB
    assert UNKNOWN.headroom_bytes is None


def test_the_name_of_a_file_stays_one_piece_of_code_in_markdown() -> None:
    heading, *_ = markdown("a`|\n<img src=x>.py:make", FITS, None).splitlines()
    _, name, after = heading.split("`")
    assert name.endswith("<img src=x>.py:make")
    assert after == " fits"
