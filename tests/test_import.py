"""Importing autofit is cheap: nothing is loaded before it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running the code."""
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    modules = json.loads(ran.stdout.splitlines()[-1])
    return {name.partition(".")[0] for name in modules}


def test_importing_autofit_loads_nothing_beyond_python_itself() -> None:
    # An editable install and setuptools load their own finders when the interpreter starts.
    at_start = loaded_by("")
    assert loaded_by("import autofit") - at_start - sys.stdlib_module_names == {"autofit"}


@pytest.mark.parametrize(
    "code",
    [
        "import autofit.cli.main",
        "import autofit.pytest_plugin",
        "from autofit.checks.verdict import Verdict",
        "import autofit; autofit.Plan(8); autofit.load",
        "from autofit import registry; registry.installed_names()",
        "import autofit.report.export",
    ],
)
def test_what_works_without_a_gpu_loads_neither_torch_nor_optuna(code: str) -> None:
    assert not loaded_by(code) & {"torch", "optuna", "pandas", "numpy", "pynvml", "cloudpickle"}


def test_a_search_loads_no_database_before_a_study_is_in_one() -> None:
    code = "from autofit.searching.study import Store; Store.open(None, {}).close()"
    loaded = loaded_by(code)
    assert "optuna" in loaded
    assert not loaded & {"sqlalchemy", "alembic", "pandas", "rich"}


@pytest.mark.slow
def test_the_public_functions_stay_functions_whatever_was_imported_before() -> None:
    everything = """
import importlib, pkgutil, types
import autofit
for module in pkgutil.walk_packages(autofit.__path__, "autofit."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in autofit.__all__:
    assert not isinstance(getattr(autofit, name), types.ModuleType), name
"""
    assert "optuna" in loaded_by(everything)
