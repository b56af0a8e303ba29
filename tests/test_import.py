"""Importing autofit is cheap: nothing is loaded before it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST_MODULES = 75
"""Of autofit in the process that calls a search: each is read before the first probe runs."""


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


@pytest.mark.slow
def test_a_search_loads_in_its_caller_little_that_only_its_worker_uses(tmp_path: Path) -> None:
    """What runs plans, looks at a step and draws is imported where it is used."""
    program = tmp_path / "search.py"
    program.write_text(
        "import json, sys, torch, autofit\n"
        "autofit.search(torch.nn.Linear(8, 4), torch.randn(4, 8), device='cpu',\n"
        "    loss_fn=lambda model, batch: model(batch).square().mean(), vram_budget='8MiB',\n"
        "    max_probes=2, progress=False).save('report.json')\n"
        "print(autofit.load('report.json'))\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    loaded = set(json.loads(ran.stdout.splitlines()[-1]))
    assert "autofit.searching.engine" in loaded
    only_workers = {"session", "measure", "profile", "flops", "evaluation", "loader"}
    assert not loaded & {f"autofit.probing.{name}" for name in only_workers}
    unused = {"autofit.report.charts", "autofit.cli.main", "rich", "sqlalchemy", "pandas"}
    assert not loaded & unused
    assert not loaded & {"autofit.probing.looks", "autofit.training.training", "torch._inductor"}
    assert not {name.split(".")[1] for name in loaded if name.startswith("autofit.")} & {
        "equivalence",
        "memory",
        "prediction",
    }
    own = [name for name in loaded if name.partition(".")[0] == "autofit"]
    assert len(own) <= MOST_MODULES, sorted(own)
