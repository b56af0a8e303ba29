"""Every row of docs/faults.md has a test, and every row of the classifier stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autofit.probing.fault_table import ROWS

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "faults.md").read_text().splitlines()
TABLE_ROWS = [
    line
    for line, above in zip(LINES[1:], LINES, strict=False)
    if line.startswith("| ") and not line.endswith("test |") and above.startswith("|")
]


@pytest.fixture(scope="module")
def tests(request: pytest.FixtureRequest) -> set[str]:
    """The tests of the files that the table names, with their parameters and without."""
    names = set()
    for file in {re.split("`|::", row)[-3] for row in TABLE_ROWS}:
        module = pytest.Module.from_parent(request.session, path=ROOT / file)
        names |= {item.nodeid for item in request.session.genitems(module)}
    return names | {name.partition("[")[0] for name in names}


@pytest.mark.parametrize("row", TABLE_ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_row_has_a_test_that_exists(row: str, tests: set[str]) -> None:
    (test,) = re.findall(r"`(tests/[\w/]+\.py::[^`]+)` \|$", row)
    assert test in tests


@pytest.mark.parametrize("kind", [row.name for row in ROWS])
def test_the_table_names_every_kind_of_exception(kind: str) -> None:
    assert any(row.startswith(f"| {kind}") for row in TABLE_ROWS)
