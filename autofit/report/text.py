"""A report as text: the answer on one screen, and with `verbose` everything.

As Markdown, for a pull request: the answer, and all else folded away.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from autofit.codec import without_commands
from autofit.measurement import ACT
from autofit.report.details import TRIAL_TITLES, Section, sections
from autofit.report.place import IN_PYTHON, Place
from autofit.report.record import Record
from autofit.report.summary import MAX_LINES, is_sure, summary, wrapped

WIDTH = 100
_MIN_WIDTH = 20  # a terminal may say that it has one column, which takes no words
_INDENT = "    "
_AT_END = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")  # spaces, and what colours them
_LEFT = frozenset((1, 2, 3, 4))
"""Columns of the trials that are words."""
_MIN_MESSAGES = 2
"""Lines for messages where a plan of many settings takes the rest of the screen."""
_BETWEEN = 2
"""Spaces between columns."""
_BREAKS = ("=", "./", "_")
"""Characters after which a word that is longer than its column is broken, best first."""

Part = str | Table | Text


def render(
    record: Record,
    width: int = WIDTH,
    *,
    verbose: bool = False,
    color: bool = False,
    place: Place = IN_PYTHON,
) -> str:
    """Return the report as text of at most `width` columns; only code and commands may be wider.

    Args:
        record: of the search.
        width: in columns; of fewer than 20 the text is as of 20.
        verbose: everything; else the answer, in at most `MAX_LINES` lines, and as many more as
            the settings of its plans take.
        color: the answer stands out in a terminal; without, there are no control characters.
        place: where it is shown.
    """
    width = max(width, _MIN_WIDTH)
    lines = _answer(record, width, color=color, place=place)
    if not verbose:
        return lines
    return lines + laid_out(_rest(record, place), width, color=color)


def laid_out(parts: Iterable[Part], width: int, *, color: bool = False) -> str:
    """Return lines and tables as text; an indent of four columns marks code: never broken."""
    console = Console(
        file=io.StringIO(),
        width=width,
        no_color=not color,
        force_terminal=color,
        force_jupyter=False,  # in a notebook rich would display the text, and write none
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        if isinstance(part, Table):
            _fit(part, width)
        if isinstance(part, Table | Text):
            console.print(part, soft_wrap=isinstance(part, Text))
        elif part.startswith(_INDENT):  # code would not run with its lines broken
            console.print(Text(part), soft_wrap=True)
        else:
            indent = len(part) - len(part.lstrip(" "))
            console.print(Padding(Text(part[indent:]), (0, 0, 0, indent)))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    kept = (_AT_END.sub(lambda end: end[0].replace(" ", ""), line) for line in lines)
    return without_commands("".join(f"{line}\n" for line in kept))


def table(
    titles: Sequence[str], lines: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> Table:
    """Return a table without borders; columns are left-aligned except for those named."""
    made = Table(box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0), header_style="")
    for number, title in enumerate(titles):
        is_right = number in right
        made.add_column(title, justify="right" if is_right else "left", overflow="fold")
    for line in lines:
        made.add_row(*(Text(cell) for cell in line))
    return made


def _fit(made: Table, width: int) -> None:
    """Break the cells of a table that is too wide: between words, and else at `_BREAKS`.

    The widest columns are narrowed; rich would break long words anywhere.
    """
    columns = [_texts(column) for column in made.columns]
    titles = [str(column.header) if made.show_header else "" for column in made.columns]
    widths = [
        max(map(cell_len, [title, *(line for cell in cells for line in cell.plain.splitlines())]))
        for title, cells in zip(titles, columns, strict=True)
    ]
    room = max(width - _BETWEEN * (len(widths) - 1), len(widths))
    while sum(widths) > room:
        widths[widths.index(max(widths))] -= 1
    for cells, most in zip(columns, widths, strict=True):
        for cell in cells:
            cell.plain = "\n".join(_broken(cell.plain, most))


def _texts(column: Column) -> list[Text]:
    return [cell for cell in column.cells if isinstance(cell, Text)]


def _broken(text: str, width: int) -> Iterator[str]:
    """Yield lines of at most this many columns."""
    for given in text.splitlines():
        line = ""
        for word in given.split(" "):
            if cell_len(f"{line} {word}") <= width or not line:
                line = f"{line} {word}" if line else word
            else:
                yield line
                line = word
            while cell_len(line) > width:
                first, line = _cut(line, width)
                yield first
        yield line


def _cut(word: str, width: int) -> tuple[str, str]:
    """Return as much of a word as has room, if possible up to one of `_BREAKS`, and the rest."""
    room = word[:width]
    ends = (max(room.rfind(character) for character in each) + 1 for each in _BREAKS)
    end = next(filter(None, ends), max(1, width - word.endswith(",")))
    return word[:end], word[end:]


def _answer(record: Record, width: int, *, color: bool, place: Place) -> str:
    """Return the answer; messages get the lines that the table and the commands leave."""
    answer = summary(record, place)
    figures = table(answer.columns, answer.rows)
    figures.columns[1].style = "bold green" if is_sure(record) else "bold yellow"
    if sum(max(map(cell_len, cells)) for cells in zip(*answer.rows, strict=True)) > width:
        for column in figures.columns:  # a setting a line
            for cell in _texts(column):
                cell.plain = cell.plain.replace(", ", ",\n")
    title = [Text(line, style="bold") for line in wrapped(answer.title, width)]
    head = laid_out([*title, "", figures, ""], width, color=color)
    room = MAX_LINES - head.count("\n") - len(("", "Apply", "More"))
    room = max(room, _MIN_MESSAGES)
    messages = [
        Text(line, style="yellow" if line.startswith(ACT) else "")
        for line in answer.messages(width, room)
    ]
    last = [Text(f"Apply:  {answer.apply}"), Text(f"More:   {answer.more}")]
    return head + laid_out([*messages, "", *last], width, color=color)


def _rest(record: Record, place: Place) -> Iterator[Part]:
    yield Text(f"Page:   {place.page}")
    for section in sections(record, place):
        yield ""
        yield Text(section.title, style="bold")
        yield ""
        yield from in_text(section)


def in_text(section: Section) -> Iterator[Part]:
    """Yield the lines and the table of a part."""
    indent = _INDENT if section.is_code else ""
    yield from (f"{indent}{line}" for line in section.lines)
    if not section.table:
        return
    titles, *lines = section.table
    if titles is not TRIAL_TITLES:
        made = table(titles, lines)
        made.show_header = any(titles)
        yield made
        return
    yield ""
    yield table(titles, lines, right=set(range(len(titles))) - _LEFT)


_SPECIAL = re.compile(r"([\\`*\[\]|])")


def markdown(record: Record, place: Place = IN_PYTHON) -> str:
    """Return the report as GitHub's Markdown; what a name contains is shown as it is."""
    answer = summary(record, place)
    lines = [f"### {plain(answer.title)}", "", *markdown_table(answer.columns, answer.rows), ""]
    for text in answer.warnings:
        lines += ["> [!WARNING]", f"> {plain(text)}", ""]
    lines += bullets(answer.remarks)
    lines += ["", *code([answer.apply])]
    for section in sections(record, place):
        lines += ["", f"<details><summary>{escape(section.title)}</summary>", ""]
        lines += [*in_markdown(section), "", "</details>"]
    return without_commands("\n".join(lines) + "\n")


def plain(text: str) -> str:
    """Return a text in which nothing is Markdown or HTML, on one line."""
    return _SPECIAL.sub(r"\\\1", escape(" ".join(text.split()), quote=False))


def markdown_table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
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


def in_markdown(section: Section) -> Iterator[str]:
    """Yield a part in Markdown."""
    yield from (code if section.is_code else bullets)(section.lines)
    if section.table:
        if section.lines:
            yield ""
        yield from markdown_table(section.table[0], section.table[1:])
