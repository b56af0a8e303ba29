"""A report as text: in short answer, three numbers and lines to paste; in full everything."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autofit.report import rows
from autofit.report.answer import headline, measured_faster
from autofit.report.record import Record
from autofit.units import counted

WIDTH = 100
_LEAST_WIDTH = 20  # a terminal may say that it has one column, which takes no words
_INDENT = "    "
_SPACES_AT_END = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")  # before the end of a colour, too
_NOTE_LINES = 3  # of a note in the short form
_LONGEST_SETTING = 40
_OUTCOME = len("unsupported")


def render(
    record: Record, width: int = WIDTH, *, verbose: bool = False, color: bool = False
) -> str:
    """Return the report as text of at most `width` columns; only code to paste may be wider.

    Args:
        record: of the search.
        width: in columns; of fewer than 20 the text is as of 20.
        verbose: everything; else the answer, its numbers, its conditions and the lines to paste.
        color: the answer stands out in a terminal; without, there are no control characters.
    """
    width = max(width, _LEAST_WIDTH)
    parts = _in_full(record, width) if verbose else _in_short(record, width)
    return laid_out(parts, width, color=color)


def laid_out(parts: Iterable[str | Table | Text], width: int, *, color: bool = False) -> str:
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
        if isinstance(part, Table | Text):
            console.print(part)
        elif part.startswith(_INDENT):  # code to paste would not run with its lines broken
            console.print(Text(part), soft_wrap=True)
        else:
            indent = len(part) - len(part.lstrip(" "))
            console.print(Padding(Text(part[indent:]), (0, 0, 0, indent)))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(_SPACES_AT_END.sub(r"\1", line) for line in lines) + "\n"


def table(
    titles: Sequence[str], lines: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)
) -> Table:
    """Return a table without lines whose columns are right-aligned but for those named."""
    made = Table(box=None, pad_edge=False, header_style="")
    for number, title in enumerate(titles):
        is_left = number in left
        made.add_column(title, justify="left" if is_left else "right", overflow="fold")
    for line in lines:
        made.add_row(*map(Text, line))
    return made


def _answer(record: Record) -> Text:
    is_sure = record.is_confirmed and record.search.is_decided
    return Text(headline(record), style="bold green" if is_sure else "bold yellow")


def _in_short(record: Record, width: int) -> Iterator[str | Table | Text]:
    yield _answer(record)
    yield ""
    numbers = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, words in rows.key_numbers(record).items():
        numbers.add_row(Text(f"  {name}"), Text(words))
    yield numbers
    yield ""
    yield from _paste(record)
    yield ""
    yield from rows.conditions(record)
    for note in record.notes:
        yield f"Note: {shorten(note, _NOTE_LINES * width - len('Note: '), placeholder=' ...')}"
    trials = counted(len(record.trials), "trial")
    yield f"In full, with {trials}: report.to_text(verbose=True), or add -v to the command"


def _in_full(record: Record, width: int) -> Iterator[str | Table | Text]:
    yield _answer(record)
    yield ""
    yield table(("", "best", "baseline"), rows.comparison(record))
    yield ""
    yield from _paste(record)
    yield ""
    yield from rows.facts(record)
    yield from rows.conditions(record)
    yield from (f"Note: {note}" for note in record.notes)
    yield f"\n{counted(len(record.trials), 'trial')}. {rows.ABOUT_TRIALS}\n"
    yield _trials_table(record, width)
    if faster := list(measured_faster(record)):
        yield "\nWhy trials that were measured faster are not the best plan\n"
        yield from (f"  {line}" for line in faster)
    if hinted := rows.hint_rows(record):
        yield f"\n{rows.ABOUT_HINTS}\n"
        yield table(hinted[0], hinted[1:])
    if record.skipped:
        yield "\nSkipped\n"
        yield from (f"  {what}: {why}" for what, why in rows.skipped_lines(record.skipped))


def _paste(record: Record) -> Iterator[str]:
    paste = record.paste.get(record.best.number)
    if paste:
        yield "To train like this:\n"
        yield from (f"{_INDENT}{line}" for line in rows.apply_lines(record))
        yield f"\n{rows.BY_HAND}:\n"
        yield from (f"{_INDENT}{line}" for line in paste)


def _trials_table(record: Record, width: int) -> Table:
    made = Table(box=None, pad_edge=False)
    for name in ("trial", "role", "micro-batch"):
        made.add_column(name, no_wrap=True)
    # One setting a line keeps names whole, where the other columns leave room for them.
    lines = list(rows.trial_rows(record))
    words = (word for line in lines for word in line.settings.split())
    is_wide = width >= WIDTH and max(map(len, words), default=0) <= _LONGEST_SETTING
    made.add_column("settings", overflow="fold", no_wrap=is_wide)
    made.add_column("outcome", overflow="fold", min_width=_OUTCOME)
    for name in ("samples/s", "held", "step"):
        made.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        settings = line.settings.replace(", ", ",\n" if is_wide else ", ")
        made.add_row(
            line.number,
            line.role,
            line.size,
            Text(settings),
            Text(line.outcome),
            line.speed,
            line.held,
            line.step,
        )
    return made
