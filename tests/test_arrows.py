"""Who may import whom, read off the source file by file.

A room is a package of `autofit`, or a module beside them. Imports under TYPE_CHECKING are for
readers and type checkers and point anywhere.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

import autofit
from autofit.registry import GROUP

ROOT = Path(__file__).parents[1]
CORE = ROOT / "autofit"
STRATEGIES = ROOT / "strategies"

WORDS = {"errors", "units", "plan", "measurement", "space", "strategy"}
"""The vocabulary: everything may use it."""
WORKLOAD = {"batching", "recipe", "optimizers", "workload"}
TRAINING = WORKLOAD | {"training", "devices", "memory", "fingerprint"}
ALLOWED = {
    "errors": set(),
    "units": {"errors"},
    "plan": {"errors"},
    "measurement": {"plan", "units", "errors"},
    "space": {"plan", "units", "errors"},
    "strategy": {"plan"},
    "registry": WORDS,
    "batching": WORDS,
    "recipe": WORDS | {"batching"},
    "optimizers": WORDS | {"batching"},
    "workload": WORDS | {"batching", "recipe", "optimizers"},
    "casts": set(),
    "loss_scale": set(),
    "memory": WORDS,
    "devices": WORDS | {"memory"},
    "fingerprint": WORDS | WORKLOAD | {"devices"},
    "training": WORDS | WORKLOAD | {"casts", "loss_scale", "devices", "memory"},
    "restoring": WORDS | WORKLOAD,
    "curve_fit": set(),
    "curve_terms": WORDS | {"curve_fit"},
    "curves": WORDS | {"curve_fit", "curve_terms"},
    "probing": WORDS | TRAINING | {"restoring", "registry"},
    "report": WORDS | {"curves", "registry"},
    "prediction": WORDS | TRAINING | {"probing", "restoring", "registry", "curves"},
    "searching": WORDS
    | TRAINING
    | {"probing", "restoring", "prediction", "report", "curves", "registry"},
    "testing": WORDS | TRAINING | {"probing", "restoring", "curves", "registry"},
}
"""Room -> the rooms it may import. A room that is not here is at the surface: it may import all,
and nobody imports it but the surface."""

ON_DEMAND = {
    "report": {
        ("training", "apply"),
        ("recipe", "_recipe"),
        ("recipe", "_warn_of_a_stand_in"),
        ("optimizers", "_check_live"),
        ("endurance", "soak"),
    },
    "searching": {("progress", "_shown")},
}
"""What a room reaches beside those, and in which function: only when its user asks for it."""

OWNERS = {
    "optuna": ("searching/",),
    "sqlalchemy": ("searching/",),
    "pynvml": ("devices/nvml.py",),
    "pandas": ("report/",),
    "cloudpickle": ("probing/",),
    "pytest": ("pytest_plugin.py",),
    "numpy": ("curves.py", "curve_fit.py", "curve_terms.py", "searching/"),
    "typer": (
        "cli.py",
        "command_process.py",
        "options.py",
        "printing.py",
        "capacity_commands.py",
    ),
    "rich": ("progress.py", "report/"),
}


@dataclass(frozen=True)
class Import:
    """One import statement's module, and the function it stands in (None: at the top)."""

    module: str
    function: str | None


def imports_of(path: Path) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, function: str | None) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.append(Import(module, function))
            if module == "autofit":
                found.extend(Import(f"autofit.{alias.name}", function) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text()), None)
    return found


def files_under(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def room_of(module: str) -> str | None:
    """autofit.probing.client -> probing; None for what is no part of autofit."""
    parts = module.split(".")
    return parts[1] if parts[0] == "autofit" and len(parts) > 1 else None


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


core_files = pytest.mark.parametrize("path", list(files_under(CORE)), ids=name_of)
strategy_files = pytest.mark.parametrize("path", list(files_under(STRATEGIES)), ids=name_of)


@core_files
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    room = path.relative_to(CORE).parts[0].removesuffix(".py")
    imported = {room_of(one.module) for one in imports_of(path)} - {None, room}
    imported -= {reached for reached, _ in ON_DEMAND.get(room, ())}  # see the next test
    rooms = {path.name.removesuffix(".py") for path in CORE.iterdir()}
    allowed = ALLOWED.get(room, rooms)
    assert imported & rooms <= allowed, f"{name_of(path)} may not import {imported - allowed}"


@pytest.mark.parametrize("room", ON_DEMAND)
def test_a_training_and_its_display_are_reached_only_on_demand(room: str) -> None:
    rooms = {reached for reached, _ in ON_DEMAND[room]}
    reaching = {
        (room_of(one.module), one.function)
        for path in files_under(CORE / room)
        for one in imports_of(path)
        if room_of(one.module) in rooms
    }
    assert reaching == ON_DEMAND[room]


@core_files
def test_each_dependency_has_one_owner(path: Path) -> None:
    here = path.relative_to(CORE).as_posix()
    for one in imports_of(path):
        owners = OWNERS.get(one.module.partition(".")[0])
        assert owners is None or here.startswith(owners), f"{here} imports {one.module}"


@core_files
def test_nothing_is_imported_that_the_distribution_does_not_ask_for(path: Path) -> None:
    asked_for = {re.split(r"[^\w-]", line)[0] for line in requires("torch-autofit") or ()}
    modules = {"nvidia-ml-py": "pynvml"}
    known = {modules.get(name, name) for name in asked_for} | {"pytest", "autofit"}
    imported = {one.module.partition(".")[0] for one in imports_of(path)} - {""}
    assert imported <= known | set(sys.stdlib_module_names)


@core_files
def test_the_core_neither_imports_nor_names_a_strategy(path: Path) -> None:
    assert "strategies" not in {room_of(one.module) for one in imports_of(path)}
    names = [entry.name for entry in entry_points(group=GROUP)]
    assert names, "no strategy is installed: install the project first"
    own_words = {"optimizer"}  # a field of every workload
    for text in strings_of(path):
        named = [n for n in names if n not in own_words and (text == n or text.startswith(f"{n}."))]
        assert not named, f"{name_of(path)} names the strategy {named[0]!r} in {text!r}"


@strategy_files
def test_a_strategy_sees_the_contract_and_torch_alone(path: Path) -> None:
    allowed = {"autofit.strategy", "autofit.plan", "autofit.errors", "torch"}
    for one in imports_of(path):
        top = one.module.partition(".")[0]
        if top in sys.stdlib_module_names or one.module.startswith("autofit.strategies."):
            continue
        depth = len(one.module) - len(one.module.lstrip("."))
        if depth:  # relative: it must stay among the strategies
            assert depth <= len(path.relative_to(STRATEGIES).parts)
            continue
        module = "torch" if top == "torch" else one.module
        assert module in allowed, f"{name_of(path)} imports {one.module}"


@core_files
def test_no_module_bears_the_name_of_a_public_function(path: Path) -> None:
    functions = {name for name in autofit.__all__ if name.islower()}
    assert {"search", "probe", "load"} <= functions
    assert path.stem not in functions
    assert path.parent.name not in functions


def test_the_table_of_arrows_has_no_dead_rooms() -> None:
    assert set(ALLOWED) <= {path.name.removesuffix(".py") for path in CORE.iterdir()}


def strings_of(path: Path) -> Iterator[str]:
    """Every string constant that is no docstring."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in documentation:
            yield ast.literal_eval(node)
