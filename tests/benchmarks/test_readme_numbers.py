"""The README has the numbers of the newest results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.readme_numbers import ROOT, cell, newest, rewritten, table


def test_the_readme_has_the_newest_results() -> None:
    text = (ROOT / "README.md").read_text()
    assert rewritten(text) == text, "run python -m benchmarks.readme_numbers"


def test_every_row_stands_in_the_readme() -> None:
    """Those in which autofit loses too."""
    lines = (ROOT / "README.md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("| tool |"))
    rows = [(name, row) for name, (_, told) in newest().items() for row in told["rows"]]
    assert rows
    for name, row in rows:
        column = next(i for i, words in enumerate(head.split("|")) if f"`{name}`" in words)
        tool = row["peer"] + ("" if row["precision"] == "own" else f", {row['precision']}")
        line = next(line for line in lines if line.startswith(f"| {tool} |"))
        assert line.split("|")[column].strip() == cell(row)


def test_an_answer_that_does_not_train_is_bold_and_one_that_is_missing_says_why() -> None:
    answer = {"micro_batch": 16, "accumulation_steps": 4, "precision": "bfloat16"}
    row = {"precision": "own", "found": {"answer": answer}, "ooms": 3}
    assert cell({**row, "verdict": {"survives": True}}) == "16 x 4 bfloat16; 3"
    assert cell({**row, "verdict": {"survives": False}}) == "**16 x 4 bfloat16**; 3"
    refused = {"error": "TypeError: the model wants two inputs"}
    assert cell({**row, "found": refused, "verdict": None}) == "none (TypeError); 3"


def test_a_newer_row_of_a_tool_takes_the_place_of_the_older(tmp_path: Path) -> None:
    def write(date: str, budget_bytes: int, **ooms: int) -> None:
        rows = [{"peer": peer, "precision": "own", "ooms": each} for peer, each in ooms.items()]
        told = {"workload": "gpt", "budget_bytes": budget_bytes, "rows": rows}
        path = tmp_path / f"{date}-versus-emulated-gpt.json"
        path.write_text(json.dumps({"date": date, "comparisons": [told]}))

    write("2026-01-01", 2**30, one=1, two=2)
    write("2026-01-02", 2**30, two=3, three=4)
    dates, told = newest(tmp_path)["gpt"]
    assert dates == "2026-01-01 to 2026-01-02"
    assert [(row["peer"], row["ooms"]) for row in told["rows"]] == [
        ("one", 1),
        ("two", 3),
        ("three", 4),
    ]
    write("2026-01-03", 2**31, one=1)
    with pytest.raises(ValueError, match="under another budget"):
        newest(tmp_path)


def test_means_leave_out_what_was_not_run() -> None:
    row = {"peer": "one", "precision": "own", "found": {"error": "x"}, "verdict": None}
    results = {
        "a": ("2026-01-01", {"budget_bytes": 2**30, "rows": [{**row, "ooms": 4}]}),
        "b": ("2026-01-01", {"budget_bytes": 2**30, "rows": [{**row, "peer": "two", "ooms": 1}]}),
    }
    _, _, one, two = table(results)
    assert one == "| one | none (x); 4 | not run | 0 of 1 | 4.0 |"
    assert two == "| two | not run | none (x); 1 | 0 of 1 | 1.0 |"


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 blocks"):
        rewritten("# autofit")
