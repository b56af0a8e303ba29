"""Who may import whom, read off the source.

A room is a package of `autofit`, or a module beside them. Imports under TYPE_CHECKING, for readers
and type checkers, may point to any room, but close no circle of files.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import entry_points
from importlib.util import resolve_name
from itertools import chain
from pathlib import Path

import autofit
from autofit.registry import GROUP, GROUP_OF_RANKS

ROOT = Path(__file__).parents[1]
CORE = ROOT / "autofit"
STRATEGIES = ROOT / "strategies"

VOCABULARY = {
    "errors",
    "units",
    "codec",
    "dimension",
    "notebook",
    "streams",
    "plan",
    "measurement",
    "rounds",
    "space",
    "strategy",
    "world",
    "torch_flags",
    "torch_private",
}
"""Every room above the vocabulary may import it."""
TRAINING = {"training", "devices", "memory", "snapshot", "equivalence"}
ALLOWED = {
    "errors": set(),
    "interrupts": set(),
    "torch_flags": set(),
    "torch_private": {"errors"},
    "notebook": set(),
    "streams": set(),
    "units": {"errors"},
    "codec": {"errors"},
    "dimension": {"codec", "errors"},
    "strategy": {"dimension", "errors"},
    "plan": {"codec", "dimension", "errors", "strategy"},
    "measurement": {"plan", "codec", "units", "errors"},
    "rounds": {"measurement", "plan"},
    "space": {"codec", "plan", "units", "errors"},
    "world": {"strategy", "errors"},
    "registry": VOCABULARY,
    "planning": VOCABULARY,
    "memory": VOCABULARY,
    "devices": VOCABULARY | {"memory"},
    "training": VOCABULARY | {"devices", "memory"},
    "snapshot": VOCABULARY,
    "equivalence": VOCABULARY | {"devices", "snapshot", "training"},
    "probing": VOCABULARY | TRAINING | {"interrupts", "registry"},
    "prediction": VOCABULARY | TRAINING | {"probing", "registry"},
    "report": VOCABULARY | {"registry"},
    "searching": VOCABULARY
    | TRAINING
    | {"interrupts", "planning", "prediction", "probing", "registry", "report"},
    "checks": VOCABULARY | TRAINING | {"prediction", "probing", "registry", "report"},
    "testing": VOCABULARY | TRAINING | {"probing", "registry"},
}
"""Room -> the rooms it may import. A room that is not here is at the surface: it may import all,
and nobody imports it but the surface."""

ON_DEMAND = {
    ("report", "training", "apply"),
    ("report", "training", "_recipe"),
    ("report", "training", "_samples"),
    ("report", "training", "_made_optimizer"),
}
"""(room, the room it reaches beside those, the function that does so when its user asks for it)."""

OWNERS = {
    "optuna": ("searching/",),
    "sqlalchemy": ("searching/",),
    "pynvml": ("devices/nvml.py",),
    "pandas": ("report/",),
    "cloudpickle": ("probing/",),
    "pytest": ("pytest_plugin.py",),
    "numpy": ("planning/", "rounds.py"),
    "msgspec": ("codec.py",),
    "typer": ("cli/",),
    "rich": ("searching/progress.py", "report/"),
    "transformers": ("integrations/",),
    "accelerate": ("integrations/",),
    "lightning": ("integrations/",),
    "pytorch_lightning": ("integrations/",),
}
"""A dependency -> the only places that import it."""


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands, what it imports, the function around it if any."""

    path: Path
    module: str
    function: str | None
    is_for_types: bool = False

    @property
    def room(self) -> str:
        return self.path.relative_to(CORE).parts[0].removesuffix(".py")

    @property
    def reached(self) -> str | None:
        """autofit.probing.session -> probing; None for what is not part of autofit."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "autofit" and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    """Yield the imports of a file, those for type checkers among them."""

    def visit(node: ast.AST, function: str | None, is_for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(path, alias.name, function, is_for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield Import(path, module, function, is_for_types)
            # `from autofit import plan` and `from autofit.memory import replay` name modules
            if not node.level and module.partition(".")[0] == "autofit":
                names = (f"{module}.{alias.name}" for alias in node.names)
                yield from (Import(path, name, function, is_for_types) for name in names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            is_for_types = True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler):
                yield from visit(child, function, is_for_types)

    return visit(nodes_of(path)[0], None, False)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the nodes of a file, the module first, parsed once for all tests that read them."""
    return list(ast.walk(ast.parse(path.read_text())))


def files_under(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


@cache
def all_imports_under(folder: Path) -> list[Import]:
    return [one for path in files_under(folder) for one in imports_of(path)]


def imports_under(folder: Path) -> list[Import]:
    """The imports that run."""
    return [one for one in all_imports_under(folder) if not one.is_for_types]


ROOMS = {path.name.removesuffix(".py") for path in CORE.iterdir() if path.name != "__pycache__"}


def test_a_room_imports_only_the_rooms_below_it() -> None:
    imports = imports_under(CORE)
    on_demand = {(one.room, one.reached, one.function) for one in imports} & ON_DEMAND
    upward = [
        str(one)
        for one in imports
        if one.reached in ROOMS - {one.room} - ALLOWED.get(one.room, ROOMS)
        and (one.room, one.reached, one.function) not in on_demand
    ]
    assert (upward, on_demand) == ([], ON_DEMAND)


def name_of(path: Path) -> str:
    """strategies/compile.py -> autofit.strategies.compile"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts).removesuffix(".__init__")
    return name if parts[0] == "autofit" else f"autofit.{name}"


def absolute(one: Import) -> str:
    """The module that an import names, relative ones as strategies have them resolved."""
    name = name_of(one.path)
    is_package = one.path.name == "__init__.py"
    return resolve_name(one.module, name if is_package else name.rpartition(".")[0])


def test_files_import_each_other_in_no_circle() -> None:
    """Neither when they run, on demand included, nor when they are checked for types."""
    paths = [*files_under(CORE), *files_under(STRATEGIES)]
    needs: dict[str, set[str]] = {name_of(path): set() for path in paths}
    for one in (*all_imports_under(CORE), *all_imports_under(STRATEGIES)):
        arrow = name_of(one.path), absolute(one)
        # `autofit` itself names what is public
        if arrow[1] in needs.keys() - {arrow[0], "autofit"}:
            needs[arrow[0]].add(arrow[1])
    order = list(TopologicalSorter(needs).static_order())  # raises CycleError, which names it
    assert set(order) == set(needs)


def test_each_dependency_has_one_owner() -> None:
    strangers = [
        str(one)
        for one in imports_under(CORE)
        if (owners := OWNERS.get(one.module.partition(".")[0]))
        and not one.path.relative_to(CORE).as_posix().startswith(owners)
    ]
    assert strangers == []


def test_nothing_is_imported_that_the_distribution_does_not_ask_for() -> None:
    # What is written, not what is installed: an environment may be older than a new dependency
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    asked_for = {re.split(r"[^\w-]", line)[0] for line in lines}
    modules = {"nvidia-ml-py": "pynvml"}
    known = {modules.get(name, name) for name in asked_for} | {"pytest", "autofit"}
    imported = {one.module.partition(".")[0] for one in imports_under(CORE)} - {""}
    assert imported <= known | set(sys.stdlib_module_names)


def test_the_core_neither_imports_nor_names_a_strategy() -> None:
    assert "strategies" not in {one.reached for one in imports_under(CORE)}
    groups = (GROUP, GROUP_OF_RANKS)
    names = {entry.name for group in groups for entry in entry_points(group=group)}
    names -= {"optimizer", "convolution"}  # a workload's field, and an operator of torch
    assert names, "no strategy is installed: install the project first"
    named = [
        f"{path.relative_to(ROOT)}: {text!r}"
        for path in files_under(CORE)
        for text in strings_of(path)
        if text.partition(".")[0] in names
    ]
    assert named == []


def test_a_strategy_sees_the_contract_and_torch_alone() -> None:
    contract = ("autofit.strategy", "autofit.plan", "autofit.errors", "autofit.strategies")
    strangers = [
        str(one)
        for one in imports_under(STRATEGIES)
        if absolute(one).partition(".")[0] not in sys.stdlib_module_names | {"torch"}
        and not f"{absolute(one)}.".startswith(tuple(f"{module}." for module in contract))
    ]
    assert strangers == []


def test_nothing_beside_the_rooms_bears_the_name_of_a_public_function() -> None:
    """`autofit.search` stays the function whatever was imported before."""
    functions = {name for name in autofit.__all__ if name.islower()}
    assert {"search", "probe", "load"} <= functions - ROOMS == functions


def test_the_table_of_arrows_has_no_dead_rooms() -> None:
    assert set(ALLOWED) <= ROOMS


def strings_of(path: Path) -> Iterator[str]:
    """Every constant that is not a docstring, as text."""
    nodes = nodes_of(path)
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            yield str(node.value)
