"""A report as one HTML file that loads nothing from elsewhere, for a screen, a phone or paper.

Every word is in the HTML; the charts are drawn by plotly.js, which is part of the file (packed).
The page's policy lets no other script run and nothing be fetched, whatever a name contains.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby

from autofit.measurement import Role, Trial
from autofit.report import rows
from autofit.report.answer import describe, factor_words, headline, measured_faster, speed_words
from autofit.report.chart_parts import Chart
from autofit.report.charts import charts
from autofit.report.memory_charts import ABOUT_KINDS, memory_charts, not_looked_at
from autofit.report.record import Record
from autofit.units import counted, format_bytes

_TRIALS = ("trial", "role", "micro-batch", "settings", "outcome", "samples/s", "held", "step")
_END_OF_PART = re.compile(r"([=_]|\.(?=[a-z]))")
_NUMBERS = frozenset(("trial", "samples/s", "held", "step"))


def page(record: Record) -> str:
    """Return the report as an HTML document."""
    drawn = [*charts(record), *memory_charts(record)]
    body = [*_header(record), "<main>", *_main(record, drawn), "</main>", _footer(record.version)]
    return _document(f"autofit: {describe(record.best.plan, record)}", body, drawn)


def page_of_charts(
    title: str, about: str, numbers: Iterable[tuple[str, str]], drawn: Sequence[Chart], version: str
) -> str:
    """Return an HTML document of a few numbers and charts.

    Args:
        title: of the page.
        about: what was measured, when and where.
        numbers: (number, the words below it).
        drawn: the charts.
        version: of autofit.
    """
    body = [
        f'<header><p class="eyebrow"><b>autofit</b> {escape(about)}</p>'
        f"<h1>{escape(title)}</h1></header>",
        f'<main><div class="cards">{"".join(_card(*each) for each in numbers)}</div>',
        *map(_plot, drawn),
        "</main>",
        _footer(version),
    ]
    return _document(f"autofit: {title}", body, drawn)


def _document(title: str, body: Iterable[str], drawn: Iterable[Chart]) -> str:
    """Return a document with its charts, style and scripts, which loads nothing."""
    style, script = _resource("page.css"), _resource("page.js")
    packed, plotly_hash = _plotly()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' '{plotly_hash}'; "
        "style-src 'unsafe-inline'; img-src data: blob:"
    )
    figures = json.dumps({chart.name: chart.figure for chart in drawn}, separators=(",", ":"))
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{style}</style>"
    )
    data = (
        f'<script type="application/json" id="figures">{_in_script(figures)}</script>\n'
        f'<script type="application/octet-stream" id="plotly">{packed}</script>\n'
        f"<script>{script}</script>"
    )
    written = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n'
        f"<body>\n{written}\n{data}\n</body>\n</html>\n"
    )


def _header(record: Record) -> Iterator[str]:
    environment = record.environment
    where = environment.get("gpu") or environment["device"]
    *changed, answer = headline(record).split("\n")
    yield "<header>"
    yield (
        f'<p class="eyebrow"><b>autofit</b> report, {escape(record.created[:10])}, '
        f"{escape(str(where))}, torch {escape(str(environment['torch']))}</p>"
    )
    yield f"<h1>{escape(answer).replace('=', '=<wbr>')}</h1>"
    yield from (f'<p class="banner">{escape(line)}</p>' for line in changed)
    yield "</header>"


def _main(record: Record, drawn: Sequence[Chart]) -> Iterator[str]:
    yield from _cards(record)
    yield '<div class="pair">'
    yield _section("Best against baseline", [_comparison(record)])
    conditions = [*rows.conditions(record), *(f"Note: {note}" for note in record.notes)]
    yield "<div>"
    yield _section("To train like this", _paste(record))
    yield _section("What the answer depends on", [_list(map(escape, conditions))])
    yield "</div></div>"
    yield from _plots(drawn)
    for line in not_looked_at(record):
        yield _section("Memory over a step", [f"<p>{escape(line)}</p>"])
    yield _section(f"All {counted(len(record.trials), 'trial')}", _trials(record), long=True)
    if faster := list(measured_faster(record)):
        what = "Why trials that were measured faster are not the best plan"
        yield _section(what, [_list(map(escape, faster))])
    if record.skipped:
        lines = (
            f"<code>{escape(what)}</code>: {escape(why)}"
            for what, why in rows.skipped_lines(record.skipped)
        )
        yield _section("What was skipped, and why", [_list(lines)])
    if hinted := rows.hint_rows(record):
        table = _table(hinted[0], hinted[1:], numbers=range(1, len(hinted[0])))
        about = f'<p class="caption">{escape(rows.ABOUT_HINTS)}.</p>'
        parts = [about, f'<div class="scroll">{table}</div>']
        yield _section("What settings were expected to change", parts)
    known = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(value)}</td></tr>'
        for label, value in rows.environment_rows(record).items()
    )
    yield _section("Environment and search", [f'<table class="facts">{known}</table>'])


def _cards(record: Record) -> Iterator[str]:
    best = record.best
    factor, held = factor_words(record), best.measurement.held_bytes or 0
    share = min(100.0, 100 * held / record.vram_budget_bytes)
    yield '<div class="cards">'
    if factor and best.plan != record.baseline_beside_best.plan:
        yield _card(f"{factor[0]} times", f"the baseline's speed ({factor[1]})", kind="main")
    yield _card(
        speed_words(best, record).removesuffix(" samples/s"),
        "samples/s, the best plan",
        kind="main",
    )
    meter = f'<div class="meter"><i style="width:{share:.1f}%"></i></div>'
    budget = f"held, of {format_bytes(record.vram_budget_bytes)} allowed"
    yield _card(format_bytes(held), budget, meter)
    plan = best.plan
    split = f"micro-batch x steps, {counted(plan.samples_per_step, 'sample')} a step"
    yield _card(f"{plan.micro_batch} x {plan.accumulation_steps}", split)
    yield "</div>"


def _card(number: str, words: str, more: str = "", *, kind: str = "") -> str:
    return (
        f'<div class="card {kind}"><b>{escape(number)}</b><span>{escape(words)}</span>{more}</div>'
    )


def _comparison(record: Record) -> str:
    table = _table(("", "best", "baseline"), rows.comparison(record), numbers=(1, 2))
    return table.replace("<table>", '<table class="compared">', 1)


def _paste(record: Record) -> Iterator[str]:
    yield _code(rows.apply_lines(record))
    if lines := record.paste.get(record.best.number):
        yield f"<h3>{rows.BY_HAND}</h3>"
        yield _code(lines)


def _plots(drawn: Sequence[Chart]) -> Iterator[str]:
    """Yield the charts; those of the memory of two plans share a row where there is room."""
    for group, together in groupby(drawn, key=lambda chart: chart.name.partition("_")[0]):
        sections = [_plot(chart) for chart in together]
        if len(sections) > 1:
            sections = ['<div class="pair">', *sections, "</div>"]
        yield from sections
        if group == "modules":
            yield f'<p class="caption below">{escape(ABOUT_KINDS)}</p>'


def _plot(chart: Chart) -> str:
    height = chart.figure["layout"]["height"]
    caption = f'<p class="caption">{escape(chart.caption)}</p>'
    plot = (
        f'<div class="plot" data-figure="{chart.name}" style="min-height:{height}px" '
        f'role="img" aria-label="{escape(chart.title)}"></div>'
    )
    return _section(chart.title, [caption, plot])


def _trials(record: Record) -> Iterator[str]:
    outcomes = sorted({trial.measurement.outcome.value for trial in record.trials})
    options = "".join(f'<option value="{name}">{name}</option>' for name in outcomes)
    yield f'<p class="caption">{escape(rows.ABOUT_TRIALS)}</p>'
    yield (
        '<div class="filters"><input id="filter-words" type="search" placeholder="filter by words" '
        'aria-label="filter by words"><select id="filter-outcome" aria-label="outcome">'
        f'<option value="">any outcome</option>{options}</select>'
        '<output id="filter-count"></output></div>'
    )
    heads = "".join(
        f'<th scope="col" class="{"number" * (name in _NUMBERS)}">'
        f'<button type="button">{name}</button></th>'
        for name in _TRIALS
    )
    lines = zip(record.trials, rows.trial_rows(record), strict=True)
    body = "\n".join(_trial(trial, line, record) for trial, line in lines)
    yield (
        f'<div class="scroll"><table class="trials"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _trial(trial: Trial, line: rows.TrialRow, record: Record) -> str:
    measured = trial.measurement
    kinds = {
        "best": trial.plan == record.best.plan and trial.ok,
        "bad": not trial.ok,
        "vetoed": trial.role is Role.VETOED,
    }
    cells: list[tuple[str, object]] = [
        (line.number, trial.number),
        (line.role, line.role),
        (line.size, line.size),
        (line.settings, line.settings),
        (line.outcome, line.outcome),
        (line.speed, trial.samples_per_second),
        (line.held, measured.held_bytes),
        (line.step, measured.step_time_s),
    ]
    written = "".join(
        f'<td class="{"number" * (name in _NUMBERS)}" '
        f'data-value="{"" if value is None else escape(str(value))}">{_breakable(text)}</td>'
        for name, (text, value) in zip(_TRIALS, cells, strict=True)
    )
    kind = " ".join(name for name, is_so in kinds.items() if is_so)
    return f'<tr class="{kind}" data-outcome="{measured.outcome.value}">{written}</tr>'


def _footer(version: str) -> str:
    return (
        f"<footer>autofit {escape(version)}. This file holds all that it shows and loads "
        "nothing. Charts: plotly.js, MIT license.</footer>"
    )


def _section(title: str, parts: Iterable[str], *, long: bool = False) -> str:
    kind = ' class="long"' if long else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _code(lines: Iterable[str]) -> str:
    text = escape("\n".join(lines))
    return f'<div class="code"><pre>{text}</pre><button type="button">copy</button></div>'


def _table(titles: Sequence[str], lines: Iterable[Sequence[str]], *, numbers: Iterable[int]) -> str:
    right = set(numbers)

    def row(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="{"number" * (at in right)}">{_breakable(cell)}</{tag}>'
            for at, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{row('td', line)}</tr>" for line in lines)
    return f"<table><thead><tr>{row('th', titles)}</tr></thead><tbody>{body}</tbody></table>"


def _breakable(text: str) -> str:
    """Return a text as HTML: settings are broken between each other, or where a part ends."""
    if "=" not in text:
        return escape(text)
    *parts, last = text.split(", ")
    units = (
        _END_OF_PART.sub(r"\1<wbr>", escape(unit)) for unit in (*(f"{p}," for p in parts), last)
    )
    return " ".join(f'<span class="whole">{unit}</span>' for unit in units)


def _in_script(text: str) -> str:
    """Return JSON that cannot end the element it stands in."""
    return text.replace("<", "\\u003c")


@cache
def _resource(name: str) -> str:
    return files("autofit.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """Return plotly.js, packed, and its hash: of 4.8 MB, a third is left."""
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs()
    packed = gzip.compress(script.encode(), 9, mtime=0)
    return base64.b64encode(packed).decode(), _hash(script)


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
