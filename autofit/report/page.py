"""A report as one HTML file that loads nothing, for a screen, a phone or paper.

The charts are SVG, so every word and number is in the HTML. The page's policy lets no other script
run and nothing be fetched, whatever a name contains.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from autofit.measurement import Trial, TrialKind
from autofit.report.charts import KINDS, Chart, frontier_chart, legend, memory_charts
from autofit.report.details import ABOUT_TRIALS, TRIAL_TITLES, Section, sections, trial_cells
from autofit.report.record import Record
from autofit.report.summary import IN_PYTHON, Place, Summary, is_sure, summary
from autofit.units import counted

_NUMBERS = frozenset(("trial", "samples/s", "memory", "step"))
_KINDS = {f"kind-{kind}": name for kind, name in KINDS.items()}
_RANGE = re.compile(r"\([\d.]+-[\d.]+\)")
_END_OF_PART = re.compile(r"([=_]|\.(?=[a-z]))")


def page(record: Record, place: Place = IN_PYTHON) -> str:
    """Return the report as an HTML document."""
    answer = summary(record, place)
    drawn = "".join(map(_figure, memory_charts(record)))
    charts = f'<div class="pair charts">{drawn}</div>{legend(_KINDS)}' if drawn else ""
    folded = (section for section in sections(record, place) if section.table[:1] != [TRIAL_TITLES])
    body = [
        _header("report", record.created[:10], answer.title),
        "<main>",
        _answer(answer, record),
        _figure(frontier_chart(record)),
        charts,
        _section(counted(len(record.trials), "trial"), _trials(record), kind="long"),
        f'<div class="more">{"".join(map(_folded, folded))}</div>',
        "</main>",
    ]
    return _document(answer.title, body, record.version)


def _document(title: str, body: Iterable[str], version: str) -> str:
    style, script = _resource("page.css"), _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>autofit: {escape(title)}</title><style>{style}</style>"
    )
    footer = f"<footer>autofit {escape(version)}. This file loads nothing.</footer>"
    written = "\n".join([*body, footer])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n'
        f"<body>\n{written}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _header(what: str, about: str, title: str) -> str:
    name, _, rest = title.partition(": ")
    more = f'<p class="course">{escape(rest)}</p>' if rest else ""
    return (
        f'<header><p class="eyebrow"><b>autofit</b> {what}, {escape(about)}</p>'
        f"<h1>{escape(name)}</h1>{more}</header>"
    )


def _answer(answer: Summary, record: Record) -> str:
    """Return the table, beside it what to act on, what to note and the line to apply."""
    held = record.best.measurement.held_bytes or 0
    share = min(100.0, 100 * held / record.vram_budget_bytes)
    meter = f'<span class="meter"><i style="width:{share:.1f}%"></i></span>'
    rows = []
    for label, *cells in answer.rows:
        shown = [_RANGE.sub(r'<span class="whole">\g<0></span>', _breakable(c)) for c in cells]
        if label == "peak memory":
            shown[0] += meter
        rows.append(_row(label, shown))
    kind = "answer" if is_sure(record) else "answer unsure"
    warnings = "".join(f'<p class="warning">{escape(text)}</p>' for text in answer.warnings)
    remarks = "".join(f"<p>{escape(text)}.</p>" for text in answer.remarks if text)
    notes = f"{warnings}{remarks}<h3>Apply</h3>{_code([answer.apply])}"
    table = _table(kind, answer.columns, rows)
    return f'<section class="pair">{table}<div class="notes">{notes}</div></section>'


def _table(kind: str, titles: Sequence[str], rows: Iterable[str]) -> str:
    heads = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    head = f"<thead><tr>{heads}</tr></thead>" if any(titles) else ""
    return f'<table class="{kind}">{head}<tbody>{"".join(rows)}</tbody></table>'


def _row(label: str, cells: Iterable[str]) -> str:
    """Return a row of a label and of cells in HTML."""
    body = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(label)}</th>{body}</tr>'


def _figure(chart: Chart) -> str:
    caption = f'<p class="caption">{escape(chart.caption)}</p>' if chart.caption else ""
    return _section(chart.title, [caption, chart.drawn], kind="figure")


def _trials(record: Record) -> Iterator[str]:
    outcomes = sorted({trial.measurement.outcome.value for trial in record.trials})
    options = "".join(f'<option value="{name}">{name}</option>' for name in outcomes)
    yield f'<p class="caption">{escape(ABOUT_TRIALS)}</p>'
    yield (
        '<div class="filters"><input id="filter-words" type="search" placeholder="Filter" '
        'aria-label="filter trials by words"><select id="filter-outcome" aria-label="outcome">'
        f'<option value="">all outcomes</option>{options}</select>'
        '<output id="filter-count"></output></div>'
    )
    heads = "".join(
        f'<th scope="col" class="{"number" * (name in _NUMBERS)}">'
        f'<button type="button">{name}</button></th>'
        for name in TRIAL_TITLES
    )
    body = "\n".join(_trial(trial, record) for trial in record.trials)
    yield f'<table class="trials"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def _trial(trial: Trial, record: Record) -> str:
    measured = trial.measurement
    kind = "vetoed" if trial.kind is TrialKind.VETOED else "" if trial.ok else "bad"
    if trial.ok and trial.plan == record.best.plan:
        kind = "best"
    values = {
        "trial": trial.number,
        "samples/s": trial.samples_per_second or "",
        "memory": measured.held_bytes or "",
        "step": measured.step_time_s or "",
    }
    cells = zip(TRIAL_TITLES, trial_cells(trial, record), strict=True)
    written = "".join(
        f'<td class="{"number" * (name in _NUMBERS)}" data-label="{name}" '
        f'data-value="{escape(str(values.get(name, text)))}">{_breakable(text)}</td>'
        for name, text in cells
    )
    return f'<tr class="{kind}" data-outcome="{measured.outcome.value}">{written}</tr>'


def _folded(section: Section) -> str:
    """Return a part that is closed until it is asked for."""
    parts = [f"<summary>{escape(section.title)}</summary>"]
    if section.is_code:
        parts.append(_code(section.lines))
    elif section.lines:
        parts.append(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in section.lines)}</ul>")
    if section.table:
        titles, *lines = section.table
        rows = (_row(label, map(_breakable, cells)) for label, *cells in lines)
        parts.append(_table("facts", titles, rows))
    return f"<details>{''.join(parts)}</details>"


def _section(title: str, parts: Iterable[str], *, kind: str) -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{"".join(parts)}</section>'


def _code(lines: Iterable[str]) -> str:
    text = escape("\n".join(lines))
    return f'<div class="code"><pre>{text}</pre><button type="button">copy</button></div>'


def _breakable(text: str) -> str:
    """Return a text as HTML that is broken between settings, or where a part of a name ends."""
    if "=" not in text:
        return escape(text)
    *parts, last = text.split(", ")
    units = (
        _END_OF_PART.sub(r"\1<wbr>", escape(unit)) for unit in (*(f"{p}," for p in parts), last)
    )
    return " ".join(f'<span class="whole">{unit}</span>' for unit in units)


@cache
def _resource(name: str) -> str:
    return files("autofit.report").joinpath(name).read_text(encoding="utf-8")
