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
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import typer.main
from torch.distributed.run import get_args_parser

import autofit
from autofit.cli.main import app
from benchmarks.stated_numbers import PAGES as NUMBERED, filled, value

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r'^(<!-- not run: [^\n]*-->\n)?```(\w+)(?: title="([^"]*)")?\n(.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_SECONDS = 540  # on a machine that is busy; alone a page takes less than a minute


def blocks_of(page: Path) -> list[Any]:
    """The (language, title, text) of each block that is run."""
    found = _BLOCK.finditer(page.read_text())
    return [match.groups(default="")[1:] for match in found if match[1] is None]


PAGES = sorted(
    p.name
    for p in DOCS.glob("*.md")
    if {"python", "bash"} & {language for language, _, _ in blocks_of(p)}
)


def test_pages_have_examples_that_run() -> None:
    assert {"index.md", "search.md", "lists.md", "report.md", "capacity.md"} <= set(PAGES)


def commands_not_run() -> Iterator[list[str]]:
    """Yield the words of each command of ours in a block that is not run."""
    for page in DOCS.glob("*.md"):
        for match in _BLOCK.finditer(page.read_text()):
            if match[1] is not None and match[2] == "bash":
                lines = (shlex.split(line, comments=True) for line in match[4].splitlines())
                yield from (_without_variables(words) for words in lines if "autofit" in words)


def _without_variables(words: list[str]) -> list[str]:
    return [word for word in words if not re.match("[A-Z_]+=", word)]


@pytest.mark.parametrize("words", [*commands_not_run()], ids=" ".join)
def test_a_command_that_is_not_run_parses(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torchrun's parser and by ours, which refuse an option that they do not have."""
    monkeypatch.chdir(tmp_path)
    for file in ("report.json", "ranks.json"):
        shutil.copy(Path(__file__).parent / "recorded" / "report.json", file)
    launcher, *arguments = words
    if launcher == "torchrun":
        given = get_args_parser().parse_args(arguments)
        assert (given.module, given.training_script) == (True, "autofit")
        arguments = given.training_script_args
    group = typer.main.get_group(app)
    with group.make_context("autofit", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, list(arguments))
        assert command is not None
        command.make_context(name, rest, parent=context)


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
        module = {"autofit": ["-m", "autofit"], "python": []}[program]
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
    for language, title, text in blocks_of(DOCS / name):
        if language == "bash":
            commands += text.splitlines()
        elif language == "python" and title:
            (tmp_path / title).write_text(text)
        elif language == "python":
            script.append(text)
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
        value("simulated-worlds", "recorded, both, gpt2_small > nobody", ".2f")
    with pytest.raises(LookupError, match="no-such-result"):
        value("no-such-result", "speed", ".2f")


@pytest.mark.slow
def test_the_readmes_checks_run_as_they_stand(tmp_path: Path, run: Callable[[str], None]) -> None:
    texts = [match[4] for match in _BLOCK.finditer((ROOT / "README.md").read_text())]
    (target,) = (text for text in texts if "\ndef make_workload" in text)
    (fixture,) = (text for text in texts if "def test_fits_24gib" in text)
    (check,) = (text for text in texts if text.startswith("autofit check"))
    (tmp_path / "train.py").write_text(target)
    (tmp_path / "test_fits.py").write_text(f"from train import make_workload\n\n\n{fixture}")
    run(check.strip())
    assert (tmp_path / "capacity.xml").exists()
    run("python -m pytest -q -n 0 -p no:cacheprovider test_fits.py")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for needed in ("material", "mkdocstrings"):
        pytest.importorskip(needed, reason="pip install -e . --group dev")
    site = tmp_path / "site"
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = [path.read_text() for path in site.rglob("*.html")]
    elsewhere = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://(?!autofit)[^"]+"')
    assert len(pages) > 8
    assert [tag for page in pages for tag in elsewhere.findall(page)] == []
    (embedded,) = re.findall(r'<iframe src="([^"]+)"', (site / "report" / "index.html").read_text())
    sample = (site / "report" / embedded).read_text()
    assert sample == autofit.load(DOCS / "sample-report.json").to_html()


def test_the_readmes_picture_is_light_and_dark_by_itself() -> None:
    """`autofit report docs/sample-report.json --out docs/frontier.svg` draws it."""
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    text = (ROOT / picture).read_text()
    drawing, plans = ElementTree.fromstring(text), autofit.load(DOCS / "sample-report.json").trials
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text
    assert 1 < text.count("</title>") <= len(plans)
    assert len(text) < 40_000


# -- Scripts of examples/: each does what its page says it does
#
# The pages show docs/outputs: `python examples/capacity.py > docs/outputs/capacity.txt`, and so on.


SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
_NEEDS = {"huggingface_trainer": ("transformers", "accelerate"), "lora": ("transformers", "peft")}


def tunes_settings_of_the_users_own(printed: str) -> None:
    first, *others = re.findall(r"'micro_batch': (\d+)\} (\d+) samples/s(.*)", printed)
    assert first[0] == "16"
    best = max(int(speed) for _, speed, too_large in others if not too_large)
    assert best > int(first[1])
    assert f"{best} samples/s in {1 + len(others)} trials" in printed


def proposes_less_that_does_not_fit(printed: str) -> None:
    free, constrained = re.findall(r"constrained: (\d+) of 12 proposals do not fit", printed)
    assert 0 <= int(constrained) <= int(free) <= 12
    (spare,) = re.findall(r"(\S+) GiB to spare", printed)
    assert float(spare) >= 0


SAYS: dict[str, str] = {
    "huggingface_trainer": "trained 4 steps of 16 samples",
    "lora": r"(?s)trains \d{4} of \d{6} parameters.*(step \d: loss \d.*){3}",
    "cnn_batchnorm": "micro-batch 32, 2 micro-batches in a step",
    "capacity": r"L4: needs [0-4]\.\d+ GiB",  # 45 M parameters by 16 bytes are 0.7 GiB
    "optuna_sampler": "",
    "optuna_fits": "",
}
CHECKS = {
    "optuna_sampler": tunes_settings_of_the_users_own,
    "optuna_fits": proposes_less_that_does_not_fit,
}


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is of torch 2.13")
def test_the_page_on_capacity_shows_what_its_example_prints(
    tmp_path: Path, run_python: Any
) -> None:
    """A prediction is the same on any machine, unlike what a search measures."""
    ran = run_python(ROOT / "examples" / "capacity.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == (ROOT / "docs" / "outputs" / "capacity.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(script: Path, tmp_path: Path, run_python: Any) -> None:
    for name in _NEEDS.get(script.stem, ()):
        pytest.importorskip(name)
    ran = run_python(script, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(SAYS[script.stem], ran.stdout)
    CHECKS.get(script.stem, str)(ran.stdout)
