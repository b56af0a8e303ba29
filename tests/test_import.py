"""Importing autofit is cheap: nothing is loaded before it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SEARCH = """
import torch, autofit
autofit.search(torch.nn.Linear(8, 4), torch.randn(4, 8), device="cpu", vram_budget="8MiB",
    loss_fn=lambda model, batch: model(batch).square().mean(), max_probes=2, progress=False,
).save("report.json")
"""
MAX_MODULES = 75
"""Of autofit in the process that calls a search: each is read before the first probe runs."""


def loaded_by(code: str, folder: Path | None = None) -> set[str]:
    """The modules that a fresh interpreter holds after running the code."""
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    told = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=folder)
    return set(json.loads(told.splitlines()[-1]))


def test_importing_autofit_loads_nothing_beyond_python_itself() -> None:
    # An editable install and setuptools load their own finders when the interpreter starts.
    loaded = {name.partition(".")[0] for name in loaded_by("import autofit") - loaded_by("")}
    assert loaded - sys.stdlib_module_names == {"autofit"}


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
    loaded = loaded_by(SEARCH, tmp_path)
    assert "autofit.searching.engine" in loaded
    only_workers = {"session", "measure", "profile", "flops", "evaluation", "loader", "looks"}
    assert not loaded & {f"autofit.probing.{name}" for name in only_workers}
    unused = {"autofit.report.charts", "autofit.cli.main", "rich", "sqlalchemy", "pandas"}
    assert not loaded & unused
    assert not loaded & {"autofit.training.training", "torch._inductor"}
    own = [name for name in loaded if name.partition(".")[0] == "autofit"]
    rooms = {name.split(".")[1] for name in own if "." in name}
    assert not rooms & {"equivalence", "memory", "prediction"}
    assert len(own) <= MAX_MODULES, sorted(own)
