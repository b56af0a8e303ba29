"""A target names a workload in a file or in a module, and says what is wrong where it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_a_file_with_the_name_of_a_module_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text(SOURCE)
    with pytest.raises(InvalidArgument, match=r"'json'.*rename"):
        load_target(f"{path}:make")


def test_a_file_whose_name_is_no_module_name_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run-2.1.py"
    path.write_text(SOURCE)
    assert load_target(f"{path}:ready").sample_batch_size == 3
