"""Targets, and files that others wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autofit.cli.options import load_target
from autofit.errors import InvalidArgument

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
"""


@pytest.fixture(autouse=True)
def _import_state() -> Iterator[None]:
    """The path and the modules as they were: a target's module goes as it came."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_models.py"
    path.write_text(SOURCE + "from my_sizes import GLOBAL_BATCH\n")
    (tmp_path / "my_sizes.py").write_text("GLOBAL_BATCH = 12\n")
    return path


def test_a_function_in_a_file_is_called(script: Path) -> None:
    assert load_target(f"{script}:make").global_batch == 12


def test_a_module_is_found_in_the_current_folder(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = script.parent / "my_package"
    package.mkdir()
    (package / "models.py").write_text(SOURCE)
    monkeypatch.chdir(script.parent)
    assert load_target("my_package.models:ready").sample_batch_size == 3


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


def test_a_module_whose_own_import_fails_is_not_said_to_be_missing(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text("import my_models_helper\n")
    monkeypatch.chdir(script.parent)
    with pytest.raises(ModuleNotFoundError, match="my_models_helper"):
        load_target("my_models:make")


def test_a_folder_that_was_removed_is_no_fault_of_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidArgument, match="not on the path"):
        load_target("no_such_module:make")


@pytest.mark.parametrize("name", ["json", "autofit", "torch", "optuna", "sympy", "profile"])
def test_a_file_with_the_name_of_a_module_in_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """So is one that is imported later: it would be found in the place of that module."""
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE)
    if name != "autofit":
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(InvalidArgument, match=rf"'{name}'.*rename"):
        load_target(f"{path}:make")
    assert str(tmp_path) not in sys.path


def test_a_file_whose_name_is_no_module_name_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run-2.1.py"
    path.write_text(SOURCE)
    assert load_target(f"{path}:ready").sample_batch_size == 3


# -- Reports, names and streams that come from elsewhere end a command in words

TRAINING = """
import torch
from autofit import Workload
from torch import nn

def make():
    batch = (torch.randn(8, 8), torch.randn(8, 1))
    return Workload(nn.Linear(8, 1), batch, criterion=nn.MSELoss())
"""


Ended = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def autofit(run_python: Callable[..., Ended]) -> Callable[..., Ended]:
    """Run `autofit` in a folder."""
    return lambda folder, *words: run_python("-m", "autofit", *words, cwd=folder)


@pytest.fixture(scope="module")
def folder(autofit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training and the report of its search."""
    made = tmp_path_factory.mktemp("searched")
    (made / "train.py").write_text(TRAINING)
    ended = autofit(
        made, "search", "train.py:make", "--device", "cpu", "--vram-budget", "1GiB",
        "--max-probes", "1", "--out", "report.json",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return made


def changed_report(folder: Path, name: str, **parts: Any) -> str:
    content = json.loads((folder / "report.json").read_text())
    for part, values in parts.items():
        content[part] = values(content[part])
    (folder / name).write_text(json.dumps(content))
    return name


@pytest.mark.slow
def test_a_file_without_end_is_no_report(autofit: Any, tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(2**36)  # it takes no room on the disk
    for path in (str(huge), "/dev/zero"):
        ended = autofit(tmp_path, "report", path)
        assert ended.returncode == 2, ended.stderr
        assert "characters" in ended.stderr


@pytest.mark.slow
def test_a_report_of_an_unknown_gpu_without_its_memory_asks_for_one(
    autofit: Any, folder: Path
) -> None:
    report = changed_report(
        folder,
        "foo.json",
        environment=lambda e: {"device": "cuda", "torch": "2", "gpu": "Foo 9000"},
    )
    ended = autofit(folder, "check", "train.py:make", "--plan-from", report)
    assert ended.returncode == 2, ended.stderr
    assert "--gpu" in ended.stderr
