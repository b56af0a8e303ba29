"""The pytest plugin, run by pytest itself."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "workloads" / "capacity_suite.py"


@pytest.fixture
def run(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> Callable[..., str]:
    """Run some tests of the suite with the plugin, and return what pytest printed."""

    def run(*arguments: str) -> str:
        (tmp_path / "test_capacity.py").write_text(TESTS.read_text())
        installed = any(entry.name == "autofit" for entry in entry_points(group="pytest11"))
        plugin = () if installed else ("-p", "autofit.pytest_plugin")
        shared = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *plugin)
        return run_python(*shared, *arguments, cwd=tmp_path).stdout

    return run


def test_a_training_that_fits_passes_and_one_that_does_not_fails(run: Callable[..., str]) -> None:
    shown = run("-k", "small or large")
    assert re.search(r"= 1 failed, 1 passed", shown)
    assert re.search(r"99999 x 1 does not fit in 2\.00 GiB.*largest micro-batch", shown)
    for line in (r"required.*GiB", r"allowed.*2\.00 GiB", "activations"):
        assert re.search(line, shown)


def test_settings(run: Callable[..., str]) -> None:
    assert re.search(r"= 1 passed", run("-k", "reduced"))


def test_a_micro_batch_keeps_the_workloads_global_batch(run: Callable[..., str]) -> None:
    assert re.search(r"= 1 passed", run("-k", "split"))


def test_a_plan_beside_its_own_parts_is_refused(run: Callable[..., str]) -> None:
    shown = run("-k", "contradiction")
    assert re.search(r"= 2 failed", shown)
    for given in ("micro_batch", "settings"):
        assert re.search(rf"InvalidArgument: .*plan=.*{given}=", shown)


def test_a_function_in_place_of_a_workload_is_refused_in_words(run: Callable[..., str]) -> None:
    shown = run("-k", "function")
    assert "AttributeError" not in shown
    assert re.search(r"InvalidArgument: .*make_workload.*make_workload\(\)", shown)


def test_the_marker_selects_the_checks(run: Callable[..., str]) -> None:
    shown = run("-k", "small or other", "-m", "autofit", "--strict-markers")
    assert re.search(r"= 1 passed, 7 deselected", shown)


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, autofit.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
