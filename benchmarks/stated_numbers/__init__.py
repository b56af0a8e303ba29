"""Puts measured numbers into README and docs, from the newest results.

    python -m benchmarks.stated_numbers           writes the pages
    python -m benchmarks.stated_numbers --check   exits with 1 where a page differs from the results

What stands in a page between `<!-- numbers: NAME -->` and `<!-- end -->` is the text NAME.md of
this folder. There `{RESULT > KEY > ... > FORMAT}` is a value of the newest
`benchmarks/results/DATE-RESULT.json`, in Python's format; in a list, a key chooses the element that
has it as a value. Several keys at once, `A & B`, give several values. `{RESULT.txt}` is a whole
file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "emulated_gpu" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
_MARKED = re.compile(r"(<!-- numbers: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_PLACE = re.compile(r"\{([\w-]+)(?:\.txt| > ([^{}]+) > ([^{}>]+))\}")


def filled(page: str) -> str:
    """Return a page with the newest results between its marks.

    Raises:
        LookupError: there is no such result, or it has no such value.
    """
    return _MARKED.sub(lambda match: f"{match[1]}\n{_text(match[2])}\n{match[3]}", page)


def _text(name: str) -> str:
    template = (Path(__file__).parent / f"{name}.md").read_text()
    return _PLACE.sub(lambda match: value(match[1], match[2], match[3]), template)


def value(result: str, keys: str | None, form: str) -> str:
    """Return what stands for `{RESULT > KEYS > FORMAT}`; without keys, for `{RESULT.txt}`."""
    if keys is None:
        return _newest(result, "txt").read_text().rstrip("\n")
    told = newest(result)
    paths = product(*(step.split(" & ") for step in keys.split(" > ")))
    return ", ".join(f"{_at(told, path):{form}}" for path in paths)


def _at(found: Any, path: Sequence[str]) -> Any:
    for key in path:
        of_list = isinstance(found, list)
        its = [each for each in found if key in each.values()] if of_list else [found.get(key)]
        if not its or its[0] is None:
            raise LookupError(f"no {key!r} of {' > '.join(path)}")
        found = its[0]
    return found


def newest(result: str) -> Any:
    """Return the newest `DATE-RESULT.json`."""
    return json.loads(_newest(result, "json").read_text())


def _newest(result: str, ending: str) -> Path:
    dated = re.compile(rf"\d{{4}}-\d\d-\d\d-{re.escape(result)}\.{ending}")
    found = sorted(path for path in RESULTS.iterdir() if dated.fullmatch(path.name))
    if not found:
        raise LookupError(f"no result DATE-{result}.{ending} in {RESULTS}")
    return found[-1]
