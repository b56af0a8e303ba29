"""Every example of the documentation runs, and the site builds without a warning.

Of each page the blocks of Python with a title are files, those without are one script, and blocks
of bash are run after it, in an empty folder. A block whose title begins with "not run" says why.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
from torch.distributed.run import get_args_parser

from autofit.cli.main import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_SECONDS = 540  # on a machine that is busy; alone a page takes less than a minute


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    found = [Block(*match.groups(default="")) for match in _BLOCK.finditer(page.read_text())]
    return [block for block in found if not block.title.startswith("not run")]


def commands_not_run() -> Iterator[list[str]]:
    """Yield the words of each command of ours in a block that is not run."""
    for page in DOCS.glob("*.md"):
        for match in _BLOCK.finditer(page.read_text()):
            if match[1] == "bash" and (match[2] or "").startswith("not run"):
                for line in match[3].splitlines():
                    words = [
                        word
                        for word in shlex.split(line, comments=True)
                        if not re.match("[A-Z_]+=", word)
                    ]
                    if "autofit" in words:
                        yield words


def runs(page: Path) -> bool:
    return any(block.language in ("python", "bash") for block in blocks_of(page))


PAGES = sorted(p.name for p in DOCS.glob("*.md") if runs(p))


def test_pages_have_examples_that_run() -> None:
    assert {"index.md", "search.md", "strategies.md", "report.md", "capacity.md"} <= set(PAGES)


def test_commands_that_are_not_run_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun's parser and by ours, which refuse an option that they do not have."""
    monkeypatch.chdir(tmp_path)
    group = typer.main.get_group(app)
    names = set()
    for launcher, *words in commands_not_run():
        arguments = words
        if launcher == "torchrun":
            given = get_args_parser().parse_args(words)
            assert (given.module, given.training_script) == (True, "autofit")
            arguments = given.training_script_args
        with group.make_context("autofit", list(arguments)) as context:
            name, command, rest = group.resolve_command(context, list(arguments))
            assert command is not None
            command.make_context(name, rest, parent=context)
            names.add((launcher, name))
    assert {("autofit", "search"), ("autofit", "soak"), ("torchrun", "check")} <= names


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PAGES)
def test_examples_of_a_page_run(name: str, tmp_path: Path, run_python: Any) -> None:
    script, commands = [], []
    for block in blocks_of(DOCS / name):
        if block.language == "bash":
            commands.append(block.text)
        elif block.language == "python" and block.title:
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "python":
            script.append(block.text)
    if script:
        (tmp_path / "page.py").write_text("\n\n".join(script))
        ran = run_python("page.py", cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    for command in commands:
        run(["bash", "-euo", "pipefail", "-c", command], tmp_path)


@pytest.mark.slow
def test_the_readmes_checks_run_as_they_stand(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    texts = [match[3] for match in _BLOCK.finditer(readme)]
    (target,) = (text for text in texts if "\ndef make_workload" in text)
    (fixture,) = (text for text in texts if "def test_fits_24gib" in text)
    (job,) = (text for text in texts if text.startswith("capacity:"))
    command = job.rpartition("- run: >")[2].split()
    (tmp_path / "train.py").write_text(target)
    (tmp_path / "test_fits.py").write_text(f"from train import make_workload\n\n\n{fixture}")
    assert command[:2] == ["autofit", "check"]
    run(command, tmp_path)
    assert (tmp_path / "capacity.xml").exists()
    quick = ["python", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "test_fits.py"]
    run(quick, tmp_path)


def run(command: list[str], folder: Path) -> None:
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
    }
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    ran = subprocess.run(
        command,
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for needed in ("material", "mkdocstrings"):
        pytest.importorskip(needed, reason="needs the dev extra: pip install -e '.[dev]'")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    elsewhere = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://(?!autofit)[^"]+"')
    loaded = {tag for page in pages for tag in elsewhere.findall(page.read_text())}
    assert len(pages) > 8
    assert loaded == set()
