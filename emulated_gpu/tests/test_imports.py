"""The package needs nothing but Python: torch is imported by the programs that it starts."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import emulated_gpu

FOLDER = Path(emulated_gpu.__file__).parent
LOADER = FOLDER / "sources" / "values" / "loader.py"  # runs at the end of `import torch`


def imported_by(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    given = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in plain | given}


def test_only_the_standard_library_is_imported() -> None:
    files = sorted(set(FOLDER.rglob("*.py")) - {LOADER})
    assert len(files) > 8
    strangers = {name for path in files for name in imported_by(path)}
    assert strangers - set(sys.stdlib_module_names) == {"emulated_gpu"}
    assert imported_by(LOADER) == {"os", "pathlib", "torch"}
