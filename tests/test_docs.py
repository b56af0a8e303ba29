"""Every example of the documentation runs, and the site builds without a warning.

Of each page the blocks of Python with a title are files, those without are one script, and blocks
of bash are run after it, in an empty folder. A comment above a block that is not run says why: it
is for us, and no heading of the page.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
from torch.distributed.run import get_args_parser

from autofit.cli.main import app
from benchmarks.stated_numbers import PAGES as NUMBERED, filled, value

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r'^(<!-- not run: [^\n]*-->\n)?```(\w+)(?: title="([^"]*)")?\n(.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_SECONDS = 540  # on a machine that is busy; alone a page takes less than a minute


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    found = _BLOCK.finditer(page.read_text())
    return [Block(*match.groups(default="")[1:]) for match in found if match[1] is None]


def commands_not_run() -> Iterator[list[str]]:
    """Yield the words of each command of ours in a block that is not run."""
    for page in DOCS.glob("*.md"):
        for match in _BLOCK.finditer(page.read_text()):
            if match[2] == "bash" and match[1] is not None:
                for line in match[4].splitlines():
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
    assert {"index.md", "search.md", "lists.md", "report.md", "capacity.md"} <= set(PAGES)


def test_commands_that_are_not_run_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun's parser and by ours, which refuse an option that they do not have."""
    monkeypatch.chdir(tmp_path)
    for file in ("report.json", "ranks.json"):
        shutil.copy(Path(__file__).parent / "recorded" / "report.json", file)
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
    assert {("autofit", "search"), ("autofit", "probe"), ("torchrun", "check")} <= names


@pytest.fixture
def run(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> Callable[[str], None]:
    """Run a command of autofit or Python in a folder of its own, as a shell would."""

    beside = str(Path(sys.executable).parent)  # where a page's own commands find python
    variables = os.environ | {"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}

    def run_line(line: str) -> None:
        command, _, out = line.partition(" > ")
        program, *words = shlex.split(command, comments=True)
        assert program in ("autofit", "python"), line
        module = ["-m", "autofit"] * (program == "autofit")
        ran = run_python(*module, *words, cwd=tmp_path, env=variables)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        if out:
            (tmp_path / out).write_text(ran.stdout)

    return run_line


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PAGES)
def test_examples_of_a_page_run(name: str, tmp_path: Path, run: Callable[[str], None]) -> None:
    script, commands = [], []
    for block in blocks_of(DOCS / name):
        if block.language == "bash":
            commands += block.text.splitlines()
        elif block.language == "python" and block.title:
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "python":
            script.append(block.text)
    if script:
        (tmp_path / "page.py").write_text("\n\n".join(script))
        run("python page.py")
    for command in filter(None, commands):
        run(command)


def test_numbers_of_pages_are_those_of_the_newest_results() -> None:
    pages = {page: page.read_text() for page in NUMBERED}
    assert {page: filled(text) for page, text in pages.items()} == pages, (
        "python -m benchmarks.stated_numbers"
    )
    assert sum("<!-- numbers: " in text for text in pages.values()) >= 2


def test_a_number_without_a_result_is_an_error() -> None:
    with pytest.raises(LookupError, match="nobody"):
        value("versus-grids", "gpt2_small > nobody > speed", ".2f")
    with pytest.raises(LookupError, match="no-such-result"):
        value("no-such-result", "speed", ".2f")


@pytest.mark.slow
def test_the_readmes_checks_run_as_they_stand(tmp_path: Path, run: Callable[[str], None]) -> None:
    readme = (ROOT / "README.md").read_text()
    texts = [match[4] for match in _BLOCK.finditer(readme)]
    (target,) = (text for text in texts if "\ndef make_workload" in text)
    (fixture,) = (text for text in texts if "def test_fits_24gib" in text)
    (job,) = (text for text in texts if text.startswith("capacity:"))
    (tmp_path / "train.py").write_text(target)
    (tmp_path / "test_fits.py").write_text(f"from train import make_workload\n\n\n{fixture}")
    run(" ".join(job.rpartition("- run: >")[2].split()))
    assert (tmp_path / "capacity.xml").exists()
    run("python -m pytest -q -n 0 -p no:cacheprovider test_fits.py")


@pytest.mark.slow
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
