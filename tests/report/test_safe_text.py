"""A report that a stranger wrote is data: nothing of it runs or moves a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autofit
from autofit.errors import InvalidArgument
from autofit.report.record import Record
from autofit.report.report import Report

CALLED = "bfloat16\n__import__('os').system('touch owned')\n#"


def written(record: Record, path: Path, change: Any) -> Path:
    data = json.loads(json.dumps(record.to_dict()))
    change(data)
    path.write_text(json.dumps(data))
    return path


def _in_a_value(data: Any) -> None:
    for trial in (data["best"], *data["trials"]):
        trial["plan"]["settings"]["precision.dtype"] = CALLED
    data["dimensions"]["precision.dtype"] = {"values": ["default", CALLED]}


def _in_a_name(data: Any) -> None:
    data["dimensions"]["a\nprint(1)\n#.b"] = {"values": [1, 2]}


@pytest.mark.parametrize("change", [_in_a_value, _in_a_name])
def test_settings_that_are_code_are_refused(record: Record, tmp_path: Path, change: Any) -> None:
    path = written(record, tmp_path / "report.json", change)
    with pytest.raises(InvalidArgument, match="no name or value of a setting"):
        autofit.load(path)


def test_lines_of_a_file_become_no_code(record: Record, tmp_path: Path) -> None:
    def add_parts(data: Any) -> None:
        part = {
            "settings": {},
            "lines": ["import os", "os.remove('x')"],
            "terms": {"autocast": "x"},
        }
        data["parts"] = [part]

    loaded = autofit.load(written(record, tmp_path / "report.json", add_parts))
    assert "os.remove" not in loaded.export("pytorch")


def test_control_characters_reach_no_terminal(record: Record, tmp_path: Path) -> None:
    def add_titles(data: Any) -> None:
        data["notes"] = ["\x1b]0;a title\x07 a \u202enote\u2069"]
        data["workload"]["loss"] = "\x1b[2J"

    loaded = autofit.load(written(record, tmp_path / "report.json", add_titles))
    for text in (str(loaded), loaded.to_text(verbose=True)):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\u202e" not in text
    assert "a title" in loaded.to_text(verbose=True)


def test_a_cell_that_looks_like_a_formula_is_quoted(record: Record, tmp_path: Path) -> None:
    def add_formula(data: Any) -> None:
        data["trials"][-1]["detail"] = "=cmd|'/C calc'!A0"

    loaded: Report = autofit.load(written(record, tmp_path / "report.json", add_formula))
    cells = loaded.save(tmp_path / "report.csv").read_text()
    assert "'=cmd" in cells
    assert ",=cmd" not in cells
