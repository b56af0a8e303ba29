"""The workflows call parts of `.ci/run`, which exist, with few rights."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = (ROOT / ".ci" / "run").read_text()
PARTS = set(re.findall(r"^        ([a-z][a-z-]*)\)", SCRIPT, re.MULTILINE))
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
yaml = pytest.importorskip("yaml", reason="pip install -e . --group test")


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def jobs() -> Iterator[tuple[str, Any]]:
    for file in FILES:
        for name, job in read(file)["jobs"].items():
            yield f"{file.stem} {name}", job


def steps() -> Iterator[tuple[str, Any]]:
    for name, job in jobs():
        for step in job.get("steps", ()):
            yield name, step


def filled(text: str, job: Any) -> Iterator[str]:
    """Yield the text with each combination of the job's matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        line = text
        for key, value in zip(matrix, values, strict=True):
            line = line.replace(f"${{{{ matrix.{key} }}}}", str(value))
        yield line


def called() -> Iterator[str]:
    """Yield the words that workflows give to `.ci/run`."""
    for _, job in jobs():
        for step in job.get("steps", ()):
            command = step.get("run", "")
            if command.startswith(".ci/run"):
                for line in filled(command, job):
                    yield from line.split()[1:]


def test_each_part_that_a_workflow_calls_exists_and_each_part_is_called() -> None:
    words = [word for word in called() if not re.match(r"[\d\"]", word)]
    assert len(PARTS) > 10
    assert set(words) == PARTS


def test_a_workflow_runs_nothing_else() -> None:
    commands = [step["run"] for _, step in steps() if "run" in step]
    assert commands
    assert [each for each in commands if not re.fullmatch(r"\.ci/run [^\n;&|]+", each)] == []


def test_each_python_of_the_metadata_is_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(":: ")[2] for line in project["classifiers"] if ":: 3." in line]
    tested = read(FOLDER / "tests.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"]
    nightly = {word for word in called() if re.match(r"\d", word)}
    assert set(named) <= set(tested) | nightly


def test_rights_are_few() -> None:
    for file in FILES:
        assert read(file)["permissions"] == {"contents": "read"}, file.name
    more = {name: job["permissions"] for name, job in jobs() if "permissions" in job}
    assert more == {
        "docs deploy": {"pages": "write", "id-token": "write"},
        "release publish": {"id-token": "write"},
    }
    checkouts = [step for _, step in steps() if step.get("uses", "").startswith("actions/checkout")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_no_job_runs_for_ever_and_none_beside_itself() -> None:
    assert [
        name for name, job in jobs() if "timeout-minutes" not in job and "uses" not in job
    ] == []
    assert [file.name for file in FILES if "group" not in read(file)["concurrency"]] == []


def test_one_major_version_of_each_action() -> None:
    used = {step["uses"] for _, step in steps() if "uses" in step}
    names = [each.partition("@")[0] for each in used]
    assert len(set(names)) == len(names)


def test_other_files_of_the_repository_agree_with_each_other() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().split("\n")
        if "==" in line
    )
    (ruff,) = [each for each in read(ROOT / ".pre-commit-config.yaml")["repos"] if "rev" in each]
    assert ruff["rev"] == f"v{pins['ruff']}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == project["version"]
    assert citation["repository-code"] == project["urls"]["Repository"]
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert read(form), form.name
