"""A report in HTML: one file that loads nothing, for a screen, a phone or paper; and a cell.

The charts are SVG, so every word and number is in the HTML. The page's policy lets no script run
and nothing be fetched, whatever a name contains.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

from autofit import notebook
from autofit.report.charts import (
    KINDS,
    Chart,
    frontier_chart,
    legend,
    memory_charts,
    speed_charts,
    standalone,
)
from autofit.report.details import TRIAL_TITLES, Section, sections
from autofit.report.place import IN_PYTHON, Place
from autofit.report.record import Record
from autofit.report.summary import Summary, is_sure, summary

_KINDS = {f"kind-{kind}": name for kind, name in KINDS.items()}
_RANGE = re.compile(r"\([\d.]+-[\d.]+\)")
_END_OF_PART = re.compile(r"(=|\.(?=[a-z]))")


_FRAME = "width:100%;height:40em;border:0"


def page(record: Record, place: Place = IN_PYTHON) -> str:
    """Return the report as an HTML document."""
    answer = summary(record, place)
    drawn = "".join(map(_figure, memory_charts(record)))
    charts = f'{legend(_KINDS)}<div class="pair charts">{drawn}</div>' if drawn else ""
    every = list(sections(record, place))
    trials = [section for section in every if section.table[:1] == [TRIAL_TITLES]]
    body = [
        _header("report", record.created[:10], answer.title),
        "<main>",
        _answer(answer, record),
        *map(_figure, speed_charts(record)),
        charts,
        *(_section(each.title, _parts(each), kind="long trials") for each in trials),
        f'<div class="more">{"".join(_folded(each) for each in every if each not in trials)}</div>',
        "</main>",
    ]
    return _document(answer.title, body, record.version)


def cell(record: Record, place: Place = IN_PYTHON) -> str:
    """Return what a notebook shows: the answer, speed against memory, and the page, folded.

    The chart is an image and the page a frame: their style would be that of the whole notebook.
    Where frames are left out, as on GitHub, the rest stays.
    """
    answer = summary(record, place)
    messages = [*(f"Warning: {text}" for text in answer.warnings), *answer.remarks]
    table = [answer.columns, *answer.rows]
    lines = [f"{answer.apply}  # train by the plan", f"{answer.more}  # show everything"]
    told = notebook.shown([answer.title, *messages], table, lines)
    drawn = b64encode(standalone(frontier_chart(record)).encode()).decode()
    image = f'<img alt="speed against memory" src="data:image/svg+xml;base64,{drawn}">'
    frame = f'<iframe sandbox srcdoc="{escape(page(record, place))}" style="{_FRAME}"></iframe>'
    return f"{told}{image}<details><summary>The whole report</summary>{frame}</details>"


def _document(title: str, body: Iterable[str], version: str) -> str:
    style = files("autofit.report").joinpath("page.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
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
        f"<body>\n{written}\n</body>\n</html>\n"
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
    held = record.recommended.measurement.held_bytes or 0
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
    caption = f'<p class="caption">{escape(chart.caption)}</p>'
    parts = [caption, chart.drawn, legend(chart.colours)]
    return _section(chart.title, parts, kind="figure")


def _folded(section: Section) -> str:
    """Return a part that is closed until it is asked for."""
    summary = f"<summary>{escape(section.title)}</summary>"
    return f"<details>{summary}{''.join(_parts(section))}</details>"


def _parts(section: Section) -> Iterator[str]:
    """Yield the lines and the table of a part."""
    if section.is_code:
        yield _code(section.lines)
    elif section.table and len(section.lines) == 1:
        yield f'<p class="caption">{escape(section.lines[0])}</p>'
    elif section.lines:
        yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in section.lines)}</ul>"
    if section.table:
        titles, *lines = section.table
        rows = (_row(label, map(_breakable, cells)) for label, *cells in lines)
        yield _table("facts", titles, rows)


def _section(title: str, parts: Iterable[str], *, kind: str) -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{"".join(parts)}</section>'


def _code(lines: Iterable[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _breakable(text: str) -> str:
    """Return a text as HTML that is broken between settings, or where a part of a name ends."""
    if "=" not in text:
        return escape(text)
    *parts, last = text.split(", ")
    units = (
        _END_OF_PART.sub(r"\1<wbr>", escape(unit)) for unit in (*(f"{p}," for p in parts), last)
    )
    return " ".join(f'<span class="whole">{unit}</span>' for unit in units)
