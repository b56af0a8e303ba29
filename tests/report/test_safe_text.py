"""A report that a stranger wrote is data: nothing of it runs or moves a terminal."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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


INJECTED = "x=__import__('os').system('echo owned')):'''\ndef h():\n with(\"\"\""


@pytest.mark.parametrize(
    ("name", "value"), [("given", [INJECTED]), ("given", ["model"]), ("trainer", INJECTED)]
)
def test_only_known_names_become_code(
    record: Record, tmp_path: Path, name: str, value: Any
) -> None:
    path = written(
        record, tmp_path / "report.json", lambda data: data["workload"].update({name: value})
    )
    with pytest.raises(InvalidArgument, match=rf"workload.{name}"):
        autofit.load(path)


def test_code_to_copy_is_written_by_what_is_installed(record: Record, tmp_path: Path) -> None:
    def add_code(data: Any) -> None:
        data["workload"]["apply"] = ["import owned"]
        for row in (data["best"], *data["trials"]):
            row["paste"] = ["import owned"]
            row["plan"]["settings"] = {"precision.dtype": "bfloat16"}
        data["dimensions"] = {"precision.dtype": {"values": ["default", "bfloat16"]}}

    loaded = autofit.load(written(record, tmp_path / "report.json", add_code))
    for text in (loaded.to_text(verbose=True), loaded.to_markdown(), loaded.to_html()):
        assert "owned" not in text
        assert "torch.bfloat16" in text


@pytest.mark.parametrize(
    "payload", [None, 3, "x", {}, {"a": 1}, [1], [None], {"shape": 3}, [["a"]], True, -1.5]
)
@pytest.mark.parametrize("setting", ["optimizer.state", "checkpointing.level", "optimizer.when"])
def test_a_payload_that_means_nothing_is_refused_in_words(
    record: Record, tmp_path: Path, setting: str, payload: Any
) -> None:
    def add_payload(data: Any) -> None:
        for row in (data["best"], *data["trials"]):
            row["plan"]["settings"] = {setting: "other"}
        data["dimensions"] = {
            setting: {"values": ["default", "other"], "payloads": [None, payload]}
        }

    loaded = autofit.load(written(record, tmp_path / "report.json", add_payload))
    model = nn.Sequential(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for use in (
        lambda: loaded.export("accelerate"),
        lambda: loaded.to_text(verbose=True),
        lambda: loaded.apply(model, optimizer, criterion=nn.MSELoss()).undo(),
    ):
        with contextlib.suppress(autofit.AutofitError):  # no other error
            use()


COMMANDS = ("::error::owned", "##[error]owned", "##vso[task.complete]owned", "##teamcity[owned]")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_a_command_to_a_ci_runner(record: Record, tmp_path: Path, command: str) -> None:
    long = "word " * 19 + command

    def add_commands(data: Any) -> None:
        data["notes"] = [f"a note\n{command}", long]
        data["workload"] |= {
            "loss": command,
            "model": f"a\n{command}",
            "sample_shapes": {long: "int64[4]"},
        }
        data["workload"]["batched"] = [long]
        data["trials"][1]["detail"] = f"a\n  {command}\n"
        data["search"]["stopped_because"] = long
        data["skipped"] = [{"settings": {}, "why": f"{command}\n{command}"}]

    loaded = autofit.load(written(record, tmp_path / "report.json", add_commands))
    for text in (
        loaded.to_text(verbose=True),
        loaded.to_text(width=40, verbose=True),
        loaded.to_markdown(),
    ):
        assert "owned" in text
        assert not [line for line in text.splitlines() if line.strip().startswith("::")]
        assert not [line for line in text.splitlines() if re.search(r"##\w*\[", line)]


def test_names_of_a_file_hold_no_line_breaks(record: Record, tmp_path: Path) -> None:
    path = written(
        record,
        tmp_path / "report.json",
        lambda data: data["workload"]["sample_shapes"].update({"a\nb": "int64[4]"}),
    )
    assert "a\\nb" in autofit.load(path).record.workload["sample_shapes"]


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
