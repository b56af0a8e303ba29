"""Targets, and files that others wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.cli.options import load_target
from autofit.errors import InvalidArgument
from tests.command_line import run_here

RECORDED = Path(__file__).parents[1] / "recorded" / "report.json"

SOURCE = """
import torch
from autofit import Workload

def make():
    return Workload(torch.nn.Linear(4, 2), torch.zeros(2, 4), global_batch=GLOBAL_BATCH)

class Zoo:
    made = Workload(torch.nn.Linear(4, 2), torch.zeros(3, 4))

ready = Zoo.made
number = 7

def sized(tokens, width=2): ...

layer = Workload(torch.nn.Linear(8, 4), torch.randn(4, 8), global_batch=8)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A target; the path and the modules are as they were afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    made = tmp_path / "my_models.py"
    made.write_text(SOURCE + "from my_sizes import GLOBAL_BATCH\n")
    (tmp_path / "my_sizes.py").write_text("GLOBAL_BATCH = 12\n")
    monkeypatch.chdir(tmp_path)
    yield made
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "target"),
    [
        ("my_package/models.py", "my_package.models:ready"),  # from the current folder
        ("run-2.1.py", "run-2.1.py:ready"),  # no name of a module
    ],
)
def test_a_file_is_found_by_its_path_and_a_module_by_its_name(
    script: Path, file: str, target: str
) -> None:
    (script.parent / file).parent.mkdir(exist_ok=True)
    (script.parent / file).write_text(SOURCE)
    assert load_target(target).sample_batch_size == 3
    assert load_target(f"{script}:make").global_batch == 12


@pytest.mark.parametrize(
    ("target", "words"),
    [
        *((bad, r"use path/to/file\.py:name") for bad in ("", "a.py", "a.py:", ":a", "package.a")),
        ("gone/models.py:make", r"gone/models\.py"),
        ("no_such_package.models:make", r"'no_such_package\.models'"),
        ("{script}:nake", r"'nake'.*make, Zoo, ready"),
        ("{script}:number", r"Workload.*function.*\bint\b"),
        ("{script}:sized", r"sized.*tokens"),
    ],
)
def test_what_is_no_target_is_refused_with_what_is_wrong(
    script: Path, target: str, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        load_target(target.format(script=script))


def test_a_module_whose_own_import_fails_is_not_said_to_be_missing(script: Path) -> None:
    script.write_text("import my_models_helper\n")
    with pytest.raises(ModuleNotFoundError, match="my_models_helper"):
        load_target("my_models:make")


def test_a_folder_that_was_removed_is_no_fault_of_the_users_code(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = script.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidArgument, match="not on the path"):
        load_target("no_such_module:make")


@pytest.mark.parametrize("name", ["json", "autofit", "torch", "optuna", "sympy", "profile"])
def test_a_file_with_the_name_of_a_module_in_use_is_refused(
    script: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """So is one that is imported later: it would be found in the place of that module."""
    path = script.with_name(f"{name}.py")
    path.write_text(SOURCE)
    if name != "autofit":
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(InvalidArgument, match=rf"'{name}'.*rename"):
        load_target(f"{path}:make")
    assert str(script.parent) not in sys.path


@pytest.mark.slow
def test_a_file_without_end_is_no_report(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(2**36)  # it takes no room on the disk
    for path in (str(huge), "/dev/zero"):
        ended = run_here("report", path)
        assert ended.code == 2, ended.err
        assert "characters" in ended.err


@pytest.mark.slow
def test_a_report_of_an_unknown_gpu_without_its_memory_asks_for_one(script: Path) -> None:
    report = json.loads(RECORDED.read_text())
    report["environment"] = {"device": "cuda", "torch": "2", "gpu": "Foo 9000"}
    script.with_name("foo.json").write_text(json.dumps(report))
    ended = run_here("check", f"{script}:layer", "--plan-from", "foo.json")
    assert ended.code == 2, ended.err
    assert "--gpu" in ended.err
