"""A report as Markdown, for a pull request: the answer, and all else folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from autofit.measurement import ACT
from autofit.report.details import Section, sections
from autofit.report.record import Record
from autofit.report.summary import IN_PYTHON, Place, summary

_SPECIAL = re.compile(r"([\\`*\[\]|])")


def markdown(record: Record, place: Place = IN_PYTHON) -> str:
    """Return the report as GitHub's Markdown; what a name contains is shown as it is."""
    answer = summary(record, place)
    lines = [f"### {plain(answer.title)}", "", *table(answer.columns, answer.rows), ""]
    lines += bullets([*(f"{ACT}{text}" for text in answer.warnings), *answer.remarks])
    lines += ["", *code([answer.apply])]
    for section in sections(record, place):
        lines += ["", f"<details><summary>{escape(section.title)}</summary>", ""]
        lines += [*_unfolded(section), "", "</details>"]
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Return a text in which nothing is Markdown or HTML, on one line."""
    return _SPECIAL.sub(r"\\\1", escape(" ".join(text.split()), quote=False))


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table."""
    yield f"| {' | '.join(titles)} |"
    yield f"|{'|'.join('---' for _ in titles)}|"
    yield from (f"| {' | '.join(map(plain, line))} |" for line in lines)


def bullets(lines: Iterable[str]) -> Iterator[str]:
    """Yield a list."""
    yield from (f"- {plain(line)}" for line in lines)


def code(lines: Sequence[str]) -> Iterator[str]:
    """Yield a block of code, fenced by more backticks than it contains."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    yield f"{fence}python"
    yield from lines
    yield fence


def _unfolded(section: Section) -> Iterator[str]:
    yield from (code if section.is_code else bullets)(section.lines)
    if section.table:
        yield ""
        yield from table(section.table[0], section.table[1:])
