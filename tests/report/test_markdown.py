"""Markdown of a report: what a pull request shows, whatever a name contains."""

from __future__ import annotations

import re
from dataclasses import replace

from autofit.report.answer import headline
from autofit.report.markdown import markdown, plain
from autofit.report.record import Record


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_answer_is_the_heading_and_the_numbers_stand_in_a_table(record: Record) -> None:
    text = markdown(record)
    assert text.splitlines()[0] == f"### {headline(record)}"
    table = {row[0]: row[1:] for row in map(cells, text.splitlines()) if len(row) == 3}
    assert table["samples/s"] == ["168 ±3%", "80 ±3%"]
    assert table["peak reserved"] == ["42.0 MiB", "24.0 MiB"]
    assert table["headroom"] == ["20.0 MiB", ""]


def test_everything_else_is_folded_and_complete(record: Record) -> None:
    text = markdown(record)
    assert text.count("<details>") == text.count("</details>") == 3
    rows = [cells(line) for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == [str(trial.number) for trial in record.trials]
    assert {len(row) for row in rows} == {8}
    assert "folding.level=2: level 1 does not run out of memory" in text
    code = text.partition("```python\n")[2].partition("\n```")[0]
    assert code.splitlines()[-2:] == record.paste[6]


def test_names_are_shown_and_mean_nothing(record: Record) -> None:
    hostile = "<script>alert(1)</script> | `x` [a](b) **c**"
    lines = replace(record, notes=(hostile,), paste={6: ["```", hostile]})
    text = markdown(lines)
    bullet = next(line for line in text.splitlines() if "alert" in line and line.startswith("-"))
    assert "<" not in bullet
    assert bullet == f"- {plain(hostile)}"
    assert re.search(r"\\\|.*\\`x\\`.*\\\[a\\\]", bullet)
    fence = re.search(r"^(`+)python$", text, re.MULTILINE)
    assert fence is not None
    assert len(fence[1]) == 4  # longer than any in the code
