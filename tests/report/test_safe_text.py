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


def of_setting(data: Any, name: str, values: list[Any], **more: Any) -> None:
    """Have the plans of a report at the last of these values of one setting."""
    for trial in (data["best"], *data["trials"]):
        trial["plan"]["settings"] = {name: values[-1]}
    data["dimensions"] = {name: {"values": values, **more}}


def written(record: Record, path: Path, change: Any) -> Path:
    data = json.loads(json.dumps(record.to_dict()))
    change(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda data: of_setting(data, "precision.dtype", ["default", CALLED]),
            "not a valid name or value of a setting",
        ),
        (
            lambda data: data["dimensions"].update({"a\nprint(1)\n#.b": {"values": [1, 2]}}),
            "not a valid name or value of a setting",
        ),
        (lambda data: data["workload"].update(given=[INJECTED]), r"workload.given"),
        (lambda data: data["workload"].update(given=["model"]), r"workload.given"),
        (lambda data: data["workload"].update(trainer=INJECTED), r"workload.trainer"),
    ],
)
def test_settings_and_names_that_are_code_are_refused(
    record: Record, tmp_path: Path, change: Any, words: str
) -> None:
    path = written(record, tmp_path / "report.json", change)
    with pytest.raises(InvalidArgument, match=words):
        autofit.load(path)


INJECTED = "x=__import__('os').system('echo owned')):'''\ndef h():\n with(\"\"\""


def test_code_to_copy_is_written_by_what_is_installed(record: Record, tmp_path: Path) -> None:
    def add_code(data: Any) -> None:
        data["parts"] = [{"settings": {}, "lines": ["import owned"], "terms": {"autocast": "x"}}]
        data["workload"]["apply"] = ["import owned"]
        for row in (data["best"], *data["trials"]):
            row["paste"] = ["import owned"]
        of_setting(data, "precision.dtype", ["default", "bfloat16"])

    loaded = autofit.load(written(record, tmp_path / "report.json", add_code))
    for text in (
        loaded.to_text(verbose=True),
        loaded.to_markdown(),
        loaded.to_html(),
        loaded.export("pytorch"),
    ):
        assert "owned" not in text
        assert "bfloat16" in text


@pytest.mark.parametrize(
    "payload", [None, 3, "x", {}, {"a": 1}, [1], [None], {"shape": 3}, [["a"]], True, -1.5]
)
@pytest.mark.parametrize("setting", ["optimizer.state", "checkpointing.level", "optimizer.when"])
def test_a_payload_that_means_nothing_is_refused_in_words(
    record: Record, tmp_path: Path, setting: str, payload: Any
) -> None:
    def add_payload(data: Any) -> None:
        of_setting(data, setting, ["default", "other"], payloads=[None, payload])

    loaded = autofit.load(written(record, tmp_path / "report.json", add_payload))
    model = nn.Sequential(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with contextlib.suppress(autofit.AutofitError):  # no other error
        loaded.to_text(verbose=True)
    with contextlib.suppress(autofit.AutofitError):
        loaded.apply(model, optimizer, criterion=nn.MSELoss()).undo()


COMMANDS = ("::error::owned", "##[error]owned", "##vso[task.complete]owned", "##teamcity[owned]",
            "\x1b]0;owned\x07 a \u202enote\u2069")  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_a_command_to_a_ci_runner_or_moves_a_terminal(
    record: Record, tmp_path: Path, command: str
) -> None:
    long = "word " * 19 + command

    def add_commands(data: Any) -> None:
        data["notes"] = [f"a note\n{command}", long]
        data["workload"] |= {
            "loss": command,
            "model": f"a\n{command}",
            "sample_shapes": {long: "int64[4]", "a\nb": "int64[4]"},
            "batched": [long],
        }
        data["trials"][1]["detail"] = f"a\n  {command}\n"
        data["search"]["stopped_because"] = long
        data["skipped"] = [{"settings": {}, "why": f"{command}\n{command}"}]

    loaded = autofit.load(written(record, tmp_path / "report.json", add_commands))
    assert "a\\nb" in loaded.record.workload["sample_shapes"]
    for text in (
        loaded.to_text(verbose=True),
        loaded.to_text(width=40, verbose=True),
        loaded.to_markdown(),
    ):
        assert "owned" in text
        assert not re.search(r"(?m)^\s*::|##\w*\[|[\x1b\x07\u202e]", text)


def test_a_cell_that_looks_like_a_formula_is_quoted(record: Record, tmp_path: Path) -> None:
    def add_formula(data: Any) -> None:
        data["trials"][-1]["detail"] = "=cmd|'/C calc'!A0"

    loaded: Report = autofit.load(written(record, tmp_path / "report.json", add_formula))
    cells = loaded.save(tmp_path / "report.csv").read_text()
    assert "'=cmd" in cells
    assert ",=cmd" not in cells
