"""A report as Markdown, for a pull request: the answer and its numbers, all else folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from autofit.report import rows
from autofit.report.answer import headline, measured_faster
from autofit.report.record import Record
from autofit.units import counted

_SPECIAL = re.compile(r"([\\`*\[\]|])")


def markdown(record: Record) -> str:
    """Return the report as GitHub's Markdown; what a name contains is shown as it is."""
    return "\n".join(_parts(record)) + "\n"


def _parts(record: Record) -> Iterator[str]:
    *changed, answer = headline(record).split("\n")
    yield f"### {plain(answer)}\n"
    yield from (f"> {plain(line)}\n" for line in changed)
    yield from table(("", "best", "baseline"), rows.comparison(record))
    yield ""
    yield from bullets([*rows.facts(record), *rows.conditions(record), *record.notes])
    yield ""
    code = [*rows.apply_lines(record), "", f"# {rows.BY_HAND}:"]
    lines = record.paste.get(record.best.number)
    yield from _folded("To train like this", _code([*code, *lines] if lines else code[:-2]))
    titles = ("trial", "role", "micro-batch", "settings", "outcome", "samples/s", "held", "step")
    trials = (list(vars(line).values()) for line in rows.trial_rows(record))
    yield from _folded(
        counted(len(record.trials), "trial"),
        [rows.ABOUT_TRIALS, "", *table(titles, trials, left=(1, 2, 3, 4))],
    )
    if faster := list(measured_faster(record)):
        what = "Why trials that were measured faster are not the best plan"
        yield from _folded(what, bullets(faster))
    if record.skipped:
        lines_of = (f"{what}: {why}" for what, why in rows.skipped_lines(record.skipped))
        yield from _folded("Skipped", bullets(lines_of))


def plain(text: str) -> str:
    """Return a text in which nothing is Markdown or HTML, on one line."""
    return _SPECIAL.sub(r"\\\1", escape(" ".join(text.split()), quote=False))


def table(
    titles: Sequence[str], lines: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)
) -> Iterator[str]:
    """Yield a table whose columns are right-aligned but for those named."""
    yield f"| {' | '.join(titles)} |"
    yield f"|{'|'.join('---' if at in left else '---:' for at in range(len(titles)))}|"
    yield from (f"| {' | '.join(map(plain, line))} |" for line in lines)


def bullets(lines: Iterable[str]) -> Iterator[str]:
    """Yield a list."""
    yield from (f"- {plain(line)}" for line in lines)


def _folded(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"<details><summary>{escape(title)}</summary>\n"
    yield from lines
    yield "\n</details>\n"


def _code(lines: Sequence[str]) -> Iterator[str]:
    """Yield a block of code, fenced by more backticks than it contains."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    yield f"{fence}python"
    yield from lines
    yield fence
