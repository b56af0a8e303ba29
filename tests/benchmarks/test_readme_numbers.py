"""The README has the numbers of the newest results."""

from __future__ import annotations

import pytest

from benchmarks.readme_numbers import ROOT, newest, rewritten


def test_the_readme_has_the_newest_results() -> None:
    text = (ROOT / "README.md").read_text()
    assert rewritten(text) == text, "run python -m benchmarks.readme_numbers"


def test_every_row_stands_in_the_readme() -> None:
    """Those in which autofit loses too."""
    text = (ROOT / "README.md").read_text()
    rows = [row["peer"] for _, told in newest().values() for row in told["rows"]]
    assert rows
    assert all(text.count(f"| {name}") >= rows.count(name) for name in rows)


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 blocks"):
        rewritten("# autofit")
