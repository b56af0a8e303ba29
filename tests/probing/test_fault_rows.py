"""Every row of docs/faults.md has a test, and every row of the classifier stands there."""

from __future__ import annotations

import re
import subprocess
import sys
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
def collected() -> str:
    """Every test of the files that the table names, as pytest calls them."""
    files = sorted({re.split("`|::", row)[-3] for row in TABLE_ROWS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return ran.stdout


@pytest.mark.parametrize("row", TABLE_ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_row_has_a_test_that_exists(row: str, collected: str) -> None:
    (test,) = re.findall(r"`(tests/[\w/]+\.py::[^`]+)` \|$", row)
    any_case = "" if test.endswith("]") else r"(\[.*\])?"
    assert re.search(f"^{re.escape(test)}{any_case}$", collected, re.MULTILINE)


@pytest.mark.parametrize("kind", [row.name for row in ROWS])
def test_the_table_names_every_kind_of_exception(kind: str) -> None:
    assert any(row.startswith(f"| {kind}") for row in TABLE_ROWS)
