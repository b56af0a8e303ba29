"""Every number that tunes the sampler stands in one table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import autofit.planning
from autofit.planning import constants

ROOM = Path(autofit.planning.__file__).parent
TABLE = Path(constants.__file__)
PLAIN = {-1, 0, 1, 2, 0.5}
"""Signs, identities, halves and squares of formulas."""
OF_FORMULAS = {
    ("curves.py", 4): "a fourth power: the error of a variance",
    ("feasibility.py", 6): "bits that `handy` keeps: about two digits",
    ("posterior.py", 3): "seeds that differ",
    ("posterior.py", 10): "seeds that differ",
    ("posterior.py", 12): "the variance of a uniform variable is a twelfth",
    ("posterior.py", 1000): "seeds that differ",
}


def _numbers(text: str) -> Iterator[tuple[int, float]]:
    """Yield the line and the value of each number that is written out."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
            continue
        if isinstance(node.value, int | float):
            yield node.lineno, node.value


def _tuned(name: str, text: str) -> list[str]:
    return [
        f"{name}:{line}: {value}"
        for line, value in _numbers(text)
        if value not in PLAIN and (name, value) not in OF_FORMULAS
    ]


def test_no_number_that_tunes_the_sampler_stands_elsewhere() -> None:
    files = [path for path in sorted(ROOM.glob("*.py")) if path != TABLE]
    assert len(files) >= 8
    assert not [found for path in files for found in _tuned(path.name, path.read_text())]


def test_such_a_number_is_found() -> None:
    text = "x = 0.045 * risk\ny = 2 * risk\nz = max(3.0, risk)"
    assert _tuned("proposals.py", text) == ["proposals.py:1: 0.045", "proposals.py:3: 3.0"]


def test_each_number_of_the_table_is_used_and_says_what_it_is() -> None:
    lines = TABLE.read_text().splitlines()
    others = "".join(path.read_text() for path in ROOM.glob("*.py") if path != TABLE)
    for node in ast.parse(TABLE.read_text()).body:
        if not isinstance(node, ast.Assign):
            continue
        (target,) = node.targets
        for name in target.elts if isinstance(target, ast.Tuple) else [target]:
            assert isinstance(name, ast.Name)
            assert re.search(rf"\b{name.id}\b", others), f"{name.id} is unused"
        said = "#" in lines[node.lineno - 1] or lines[node.lineno - 2].startswith("#")
        assert said or "_PRIOR" in lines[node.lineno - 1], f"line {node.lineno} has no comment"
