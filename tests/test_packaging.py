"""What is published: what wheel and sdist hold, and that they work away from the repository.

The environment it is installed into is fresh and sees this one's libraries through their folders
alone, so an editable install here cannot help it.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import index_readme
import pytest
import readme_example

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://example.org/owner/project"


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the repository gets no build folder."""
    source = tmp_path_factory.mktemp("source")
    for name in ("autofit", "strategies"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", ".")
    run(sys.executable, *build, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel installed."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    interpreter = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    folders = [path for path in sys.path if path.endswith("-packages")]  # this one may borrow some
    (packages / "libraries.pth").write_text("\n".join(folders) + "\n")
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=folder)
    return interpreter


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project with packages whose names are close to ours."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("strategies", "benchmarks", "tests"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
    (folder / "strategies" / "precision.py").write_text("WIDTH = 16\n")
    (folder / "models.py").write_text(
        "import torch\n"
        "from autofit import Workload\n"
        "from strategies.precision import WIDTH\n"
        "def small():\n"
        "    return Workload(lambda: torch.nn.Linear(8, WIDTH), torch.randn(4, 8))\n"
    )
    return folder


def packaged_files(*patterns: str) -> set[Path]:
    """Files of the two folders that make the distribution, by their paths in it."""
    places = {ROOT / "autofit": Path("autofit"), ROOT / "strategies": Path("autofit/strategies")}
    return {
        place / path.relative_to(folder)
        for folder, place in places.items()
        for pattern in patterns
        for path in folder.rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_list_of_packages_is_that_of_the_folders() -> None:
    # setuptools finds packages in a folder, but not under the name that setup.cfg maps one to
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    found = {".".join(path.parent.parts) for path in packaged_files("*.py")}
    assert sorted(listed) == sorted(found)


@pytest.mark.slow
def test_every_file_of_the_packages_is_in_the_wheel_and_nothing_else(wheel: Path) -> None:
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    tops = {path.parts[0] for path in names}
    assert tops == {"autofit", next(top for top in tops if top.endswith(".dist-info"))}
    assert {path for path in names if path.parts[0] == "autofit"} == packaged_files("*")


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout, which knows its files")
def test_the_source_distribution_has_every_file_of_the_repository(tmp_path: Path) -> None:
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    files = {Path(line) for line in listed.splitlines() if (ROOT / line).exists()}
    source = tmp_path / "source"
    for path in files:
        (source / path.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    build = ("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path / "dist", source)
    run(sys.executable, *build, cwd=tmp_path)
    (built,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {Path(*Path(each.name).parts[1:]) for each in archive if each.isfile()}
    generated = {path for path in names if path.parts[0].endswith(".egg-info")} | {Path("PKG-INFO")}
    assert names - generated == files


@pytest.mark.slow
def test_its_metadata_say_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "torch-autofit"
    assert metadata["License-Expression"] == "MIT"
    assert any(entry.endswith("licenses/LICENSE") for entry in archive.namelist())
    required = [text for text in metadata.get_all("Requires-Dist") or () if "extra" not in text]
    assert any(text.startswith("torch>=") for text in required)
    assert any(text.startswith("optuna>=5") for text in required)
    assert set(metadata.get_all("Provides-Extra") or ()) == {
        "accelerate",
        "lightning",
        "peft",
        "transformers",
    }
    urls = [line.partition(", ")[0] for line in metadata.get_all("Project-URL") or ()]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= set(urls)


def test_links_of_the_readme_work_on_the_index() -> None:
    text = index_readme.absolute((ROOT / "README.md").read_text(), REPOSITORY, "v1.0", ROOT)
    links = re.findall(r'\]\(([^)]+)\)|(?:src|srcset|href)="([^"]+)"', text)
    assert links
    relative = [link for pair in links for link in pair if link and not re.match("https?:|#", link)]
    assert relative == []
    assert f"]({REPOSITORY}/blob/v1.0/docs/" in text


def test_links_to_pages_pictures_and_folders_have_each_their_place(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("docs/a.md", "docs/a.png"):
        (tmp_path / name).touch()
    text = "[a](docs/a.md#part) ![b](docs/a.png) [c](docs) [d](#here) [e](https://x.y) "
    text += 'src="docs/a.png"'
    assert index_readme.absolute(text, "R", "t", tmp_path) == (
        "[a](R/blob/t/docs/a.md#part) ![b](R/raw/t/docs/a.png) [c](R/tree/t/docs) [d](#here) "
        '[e](https://x.y) src="R/raw/t/docs/a.png"'
    )
    with pytest.raises(LookupError, match=r"docs/no\.md"):
        index_readme.absolute("[a](docs/no.md)", "R", "t", tmp_path)


def test_the_readmes_example_is_run_on_the_cpu_and_otherwise_as_it_stands() -> None:
    readme = (
        "```python\nprint(1)\n```\n```python\n"
        'report = autofit.search(model, batch, vram_budget="24GiB", global_batch=256)\n```\n'
    )
    script = readme_example.example(readme)
    assert "print(1)" not in script
    assert "search(model, batch, global_batch=256, device='cpu', vram_budget='64MiB'" in script
    compile(readme_example.example((ROOT / "README.md").read_text()), "example.py", "exec")
    with pytest.raises(LookupError):
        readme_example.example("```python\nprint(1)\n```")


@pytest.mark.slow
def test_every_strategy_comes_from_the_installed_package(python: Path, project: Path) -> None:
    program = """
import sys
from autofit.registry import load_strategies
for strategy in load_strategies():
    print(strategy.name, type(strategy).__module__, sys.modules[type(strategy).__module__].__file__)
assert "strategies" not in sys.modules
import strategies.precision
assert strategies.precision.WIDTH == 16
"""
    rows = [line.split() for line in run(python, "-c", program, cwd=project).splitlines()]
    assert {"checkpointing", "memory_format", "precision"} <= {name for name, _, _ in rows}
    for _, module, file in rows:
        assert module.startswith("autofit.strategies.")
        assert Path(file).is_relative_to(python.parents[1])


@pytest.mark.slow
def test_the_command_runs_beside_a_users_own_strategies(python: Path, project: Path) -> None:
    command = python.with_name("autofit")
    assert "precision" in run(command, "doctor", "--device", "cpu", cwd=project)
    limits = ("--device=cpu", "--vram-budget=32MiB", "--max-probes=1", "--strategies=precision")
    shown = run(command, "search", "models.py:small", *limits, cwd=project)
    assert shown.startswith("small on cpu")
    assert "4 x 1" in shown


@pytest.mark.slow
def test_the_wheel_of_the_emulated_gpu_has_its_sources_and_its_command(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    source = shutil.copytree(ROOT / "emulated_gpu", tmp_path / "source", ignore=ignored)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    archive = zipfile.ZipFile(built)
    names = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
    package = source / "src"
    files = {path.relative_to(package) for path in (package / "emulated_gpu").rglob("*")}
    assert names == {path for path in files if (package / path).is_file()}
    assert Path("emulated_gpu/sources/values/operators.cpp") in names
    (entries,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
    assert "emulated-gpu = emulated_gpu.__main__:main" in archive.read(entries).decode()
