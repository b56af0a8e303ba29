"""The pytest plugin, run by pytest itself."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "workloads" / "capacity_suite.py"


@pytest.fixture(scope="module")
def shown(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """What pytest prints of the suite's tests that have the plugin's marker."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_capacity.py").write_text(TESTS.read_text())
    installed = any(entry.name == "autofit" for entry in entry_points(group="pytest11"))
    plugin = () if installed else ("-p", "autofit.pytest_plugin")
    quiet = ("-p", "no:cacheprovider", "-p", "no:xdist", "-rA")
    marked = ("-m", "autofit", "--strict-markers")
    return run_python("-m", "pytest", *quiet, *plugin, *marked, cwd=folder).stdout


def test_the_marker_selects_the_checks(shown: str) -> None:
    assert re.search(r"= 4 failed, 3 passed, 1 deselected", shown)


def test_a_training_that_fits_passes_and_one_that_does_not_fails(shown: str) -> None:
    for passed in ("small", "reduced", "split"):
        assert re.search(rf"^PASSED .*::test_{passed}$", shown, re.MULTILINE)
    assert re.search(r"99999 x 1 does not fit in 2\.00 GiB.*largest micro-batch", shown)
    for line in (r"required.*GiB", r"VRAM budget.*2\.00 GiB", "activations"):
        assert re.search(line, shown)


def test_what_cannot_be_meant_is_refused_in_words(shown: str) -> None:
    for given in ("micro_batch", "settings"):
        assert re.search(rf"InvalidArgument: .*plan=.*{given}=", shown)
    assert "AttributeError" not in shown
    assert re.search(r"InvalidArgument: workload must be .*, got a function", shown)
