"""The wheel: what is in it, and that it works away from the repository, beside a user's own names.

The environment it is installed into is fresh and sees this one's libraries through their folders
alone, so an editable install here cannot help it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


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


def test_every_package_of_the_repository_is_in_the_wheel_and_nothing_else(wheel: Path) -> None:
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    modules = {path for path in names if path.suffix == ".py"}
    core = {path.relative_to(ROOT) for path in (ROOT / "autofit").rglob("*.py")}
    strategies = {
        Path("autofit", path.relative_to(ROOT)) for path in (ROOT / "strategies").rglob("*.py")
    }
    assert modules == core | strategies
    tops = {path.parts[0] for path in names}
    assert tops == {"autofit", next(top for top in tops if top.endswith(".dist-info"))}
    data = ("py.typed", "report/page.css")
    assert {Path("autofit", name) for name in data} <= names


def test_the_source_distribution_has_no_tests_that_cannot_run(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("autofit", "strategies", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    files = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
    for name in files:
        shutil.copy(ROOT / name, tmp_path)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", ".", cwd=tmp_path)
    (built,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert not [path for path in names if path.parts[:1] == ("tests",)]
    assert Path("CHANGELOG.md") in names
    modules = [
        p.relative_to(ROOT) for top in ("autofit", "strategies") for p in (ROOT / top).rglob("*.py")
    ]
    assert set(modules) <= names


def test_its_metadata_say_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "torch-autofit"
    assert metadata["License"] == "MIT"
    assert any(entry.endswith("licenses/LICENSE") for entry in archive.namelist())
    required = [text for text in metadata.get_all("Requires-Dist") or () if "extra" not in text]
    assert any(text.startswith("torch>=") for text in required)
    assert any(text.startswith("optuna>=5") for text in required)


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


def test_the_command_runs_beside_a_users_own_strategies(python: Path, project: Path) -> None:
    command = python.with_name("autofit")
    assert "precision" in run(command, "doctor", "--device", "cpu", cwd=project)
    limits = ("--device=cpu", "--vram-budget=32MiB", "--max-probes=1", "--strategies=precision")
    shown = run(command, "search", "models.py:small", *limits, cwd=project)
    assert shown.startswith("small on cpu")
    assert "4 x 1" in shown


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
