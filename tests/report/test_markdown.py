"""Markdown of a report: what a pull request shows, whatever a name contains."""

from __future__ import annotations

import re
from dataclasses import replace

from autofit.measurement import ACT
from autofit.report.record import Record
from autofit.report.summary import summary
from autofit.report.text import markdown, plain


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_answer_is_the_heading_and_the_numbers_stand_in_a_table(record: Record) -> None:
    text = markdown(record)
    answer = summary(record)
    assert text.splitlines()[0] == f"### {answer.title}"
    table = {row[0]: tuple(row[1:]) for row in map(cells, text.splitlines()) if len(row) == 3}
    assert {label: (best, beside) for label, best, beside in answer.rows}.items() <= table.items()
    assert table["headroom"] == ("20.0 MiB", "")
    assert answer.apply in text


def test_everything_else_is_folded_and_complete(record: Record) -> None:
    text = markdown(record)
    assert text.count("<details>") == text.count("</details>") > 3
    rows = [cells(line) for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == [str(trial.number) for trial in record.trials]
    assert {len(row) for row in rows} == {8}
    assert "folding.level=2: level 1 does not run out of memory" in text
    codes = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    assert codes[-1].splitlines() == record.paste[6]


def test_names_are_shown_and_mean_nothing(record: Record) -> None:
    hostile = "<script>alert(1)</script> | `x` [a](b) **c**"
    lines = replace(record, notes=(f"{ACT}{hostile}",), paste={6: ["```", hostile]})
    text = markdown(lines)
    bullets = [line for line in text.splitlines() if "alert" in line and line.startswith("-")]
    assert bullets == [f"- ! {plain(hostile)}"] * 2  # above, and among all notes
    assert "<" not in bullets[0]
    assert re.search(r"\\\|.*\\`x\\`.*\\\[a\\\]", bullets[0])
    fences = re.findall(r"^(`+)python$", text, re.MULTILINE)
    assert max(map(len, fences)) == 4  # longer than any in the code
