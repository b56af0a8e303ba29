"""The charts of a report as figures of plotly.js: plain data, computed from the record alone.

Lengths of bytes are divided by a power of two and nothing else, so every plotted number is one of
the report file's. Names are escaped: plotly.js reads a little HTML in texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

from autofit.measurement import Outcome, Role, Trial
from autofit.plan import VariantKey
from autofit.report.answer import describe
from autofit.report.record import Record, frontier
from autofit.report.rows import outcome_words, settings_words
from autofit.units import GIB, KIB, MIB, TIB, format_bytes, format_rate, format_seconds

Figure: TypeAlias = dict[str, Any]
"""{"data": traces, "layout": layout}, as `Plotly.newPlot` takes them."""

INK, MUTED, GRID = "#1e293b", "#64748b", "#e2e8f0"
BEST, BASELINE, TRIED, FAILED, BUDGET = "#0f766e", "#64748b", "#60a5fa", "#dc2626", "#b45309"
VARIANTS = ("#2563eb", "#d97706", "#9333ea", "#db2777", "#0891b2", "#65a30d")
"""Colors of variants that are neither the best plan's nor plain."""
_MOST_LINES = 6
"""Variants that are shown at first; a touch on the legend shows the others."""
_WIDE_BUDGET = 3.0
"""A budget so many times what any plan held is told in words, or all points lie at one edge."""
_UNITS = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}


@dataclass(frozen=True)
class Chart:
    """A chart and the words around it.

    Attributes:
        name: of its place on the page.
        title: what it shows.
        caption: how to read it.
        figure: for plotly.js.
    """

    name: str
    title: str
    caption: str
    figure: Figure


def charts(record: Record) -> Iterator[Chart]:
    """Yield the charts of a search, in the order of the page."""
    yield _frontier(record)
    if record.is_confirmed and len(record.finalists) > 1:
        yield _blocks(record)
    yield _memory_lines(record)
    yield _speed_curves(record)
    yield _course(record)


def scale_for(most_bytes: float) -> tuple[str, int]:
    """Return the unit in which so many bytes are written, and its size."""
    return next((unit for unit in _UNITS.items() if most_bytes >= unit[1]), ("B", 1))


def layout(height: int, **more: Any) -> dict[str, Any]:
    """Return a layout in the style of the page; `more` overrides it."""
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": "#cbd5e1", "ticks": "outside"}
    axis |= {"tickcolor": "#cbd5e1", "fixedrange": True, "automargin": True}
    base: dict[str, Any] = {
        "height": height,
        "margin": {"l": 52, "r": 14, "t": 34, "b": 44},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"color": INK}},
        "dragmode": False,
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 11}},
        "shapes": [],
        "annotations": [],
    }
    axes = {name: axis | more.pop(name) for name in list(more) if name[1:5] == "axis"}
    return base | axes | more


def title(text: str) -> dict[str, Any]:
    """Return the title of an axis."""
    return {"title": {"text": text, "font": {"size": 12, "color": MUTED}, "standoff": 8}}


def points(
    name: str, at: Iterable[tuple[float, float]], color: str, hover: Sequence[str], **more: Any
) -> dict[str, Any]:
    """Return a trace of markers with a text for each."""
    places = list(at)
    marker = {"color": color, "size": 9, "line": {"color": "#ffffff", "width": 1}}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [x for x, _ in places],
        "y": [y for _, y in places],
        "hovertext": list(hover),
        "hoverinfo": "text",
        "marker": marker | more.pop("marker", {}),
    } | more


def line(axis: str, at: float, color: str = BUDGET) -> dict[str, Any]:
    """Return a dashed line across the plot at a value of that axis, "x" or "y"."""
    other = "y" if axis[0] == "x" else "x"
    return {
        "type": "line",
        f"{axis[0]}ref": axis,
        f"{other}ref": "paper",
        f"{axis[0]}0": at,
        f"{axis[0]}1": at,
        f"{other}0": 0,
        f"{other}1": 1,
        "line": {"color": color, "width": 1.5, "dash": "dash"},
    }


def note(text: str, x: float, y: float, color: str = MUTED, **more: Any) -> dict[str, Any]:
    """Return a small text in the plot."""
    font = {"size": 11, "color": color}
    return {"text": text, "x": x, "y": y, "showarrow": False, "font": font} | more


def hover_of(trial: Trial, record: Record) -> str:
    """Return what a touch on a trial shows."""
    measured = trial.measurement
    parts = [
        f"<b>{escape(describe(trial.plan, record), quote=False)}</b>",
        f"trial {trial.number}, {trial.role.value}: {escape(outcome_words(trial), quote=False)}",
    ]
    if trial.samples_per_second:
        parts.append(
            f"{format_rate(trial.samples_per_second)}, {format_seconds(measured.step_time_s)} a step"
        )
    if measured.held_bytes is not None:
        parts.append(f"held {format_bytes(measured.held_bytes)}")
    if trial.predicted_peak_bytes is not None:
        parts.append(f"expected {format_bytes(trial.predicted_peak_bytes)}")
    return "<br>".join(parts)


def _ran(record: Record) -> list[Trial]:
    return [trial for trial in record.trials if trial.role is not Role.VETOED]


def _latest(record: Record) -> list[Trial]:
    """Return the last fitting trial of each plan, as the frontier takes them."""
    fits = [trial for trial in _ran(record) if trial.ok and trial.samples_per_second]
    return list({trial.plan: trial for trial in fits}.values())


def _scale(record: Record) -> tuple[str, int]:
    held = [trial.measurement.held_bytes or 0 for trial in _ran(record)]
    most = max(held)
    return scale_for(max(most, min(record.vram_budget_bytes, _WIDE_BUDGET * most)))


def _budget_axis(record: Record, most: float, size: int) -> tuple[float, bool]:
    """Return the end of an axis of bytes, in the unit, and whether the budget lies on it."""
    shown = record.vram_budget_bytes <= _WIDE_BUDGET * most
    return 1.08 * max(most, record.vram_budget_bytes * shown) / size, shown


def _frontier(record: Record) -> Chart:
    unit, size = _scale(record)
    fits, over = _latest(record), [t for t in _ran(record) if not t.ok]
    best = next(trial for trial in fits if trial.plan == record.best.plan)
    baseline = record.baseline_beside_best

    def place(trial: Trial) -> tuple[float, float]:
        return (trial.measurement.held_bytes or 0) / size, trial.samples_per_second or 0.0

    edge = sorted(frontier(record.trials), key=lambda trial: trial.measurement.held_bytes or 0)
    others = [t for t in fits if t.plan not in (record.best.plan, baseline.plan)]
    failed = [t for t in over if t.measurement.outcome.about_memory and t.measurement.held_bytes]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "frontier",
            "x": [place(trial)[0] for trial in edge],
            "y": [place(trial)[1] for trial in edge],
            "line": {"shape": "hv", "color": BEST, "width": 2},
            "hoverinfo": "skip",
        },
        points("plan", map(place, others), TRIED, [hover_of(t, record) for t in others]),
        points(
            "does not fit",
            ((place(t)[0], 0.0) for t in failed),
            FAILED,
            [hover_of(t, record) for t in failed],
            marker={"symbol": "x", "line": {"width": 0}},
            cliponaxis=False,
        ),
    ]
    if baseline.ok:
        marker = {"symbol": "diamond", "size": 13}
        hover = [hover_of(baseline, record)]
        traces.append(points("baseline", [place(baseline)], BASELINE, hover, marker=marker))
    star = {"symbol": "star", "size": 17}
    traces.append(points("best", [place(best)], BEST, [hover_of(best, record)], marker=star))
    end, has_budget = _budget_axis(record, max(place(t)[0] for t in (*fits, *failed)) * size, size)
    words = f"VRAM budget {format_bytes(record.vram_budget_bytes)}"
    top = 1.12 * max(place(trial)[1] for trial in fits)
    arranged = layout(
        380,
        xaxis=title(f"memory held, {unit}") | {"range": [0, end]},
        yaxis=title("samples/s") | {"range": [0, top]},
    )
    if has_budget:
        arranged["shapes"] = [line("x", record.vram_budget_bytes / size)]
        edge_x = record.vram_budget_bytes / size
        words_at = note(words, edge_x, top, BUDGET, xanchor="right", yanchor="top", xshift=-4)
    else:
        words_at = note(f"{words} →", 1, top, BUDGET, xref="paper", xanchor="right", yanchor="top")
    arranged["annotations"] = [words_at]
    return Chart(
        "frontier",
        "Speed against memory",
        "Each point is a plan that was run, by the last of its trials. Nothing above the line and "
        "to its left was found: more speed takes more memory. Held is peak reserved plus non-torch.",
        {"data": traces, "layout": arranged},
    )


def _blocks(record: Record) -> Chart:
    finalists = record.finalists
    baseline = record.baseline_beside_best.plan
    colors = {record.best.plan: BEST, baseline: BASELINE}
    traces, notes = [], []
    for row, (plan, speed) in enumerate(reversed(finalists)):
        color, blocks = colors.get(plan, TRIED), record.blocks(plan)
        name = "baseline" if plan == baseline else "best" if plan == record.best.plan else "plan"
        at = [(trial.samples_per_second or 0.0, row) for trial in blocks]
        traces.append(points(name, at, color, [hover_of(t, record) for t in blocks]))
        median = points(name, [(speed, row)], color, [f"median {format_rate(speed)}"])
        bar = {"symbol": "line-ns-open", "size": 22, "line": {"color": color, "width": 3}}
        traces.append(median | {"marker": bar})
        label = escape(describe(plan, record), quote=False)
        mark = f" <b>({name})</b>" * (plan in colors)
        notes.append(
            note(
                label + mark, 0, row, INK, xref="paper", xanchor="left", yanchor="bottom", yshift=9
            )
        )
    arranged = layout(
        70 + 58 * len(finalists),
        xaxis=title("samples/s") | {"rangemode": "tozero"},
        yaxis={"showticklabels": False, "ticks": "", "range": [-0.5, len(finalists) - 0.3]},
        showlegend=False,
        annotations=notes,
        margin={"l": 14, "r": 14, "t": 8, "b": 44},
    )
    return Chart(
        "blocks",
        "The final comparison",
        "The leading plans and the baseline took turns, each block in a fresh worker. Each point is "
        "a block, each bar the median that the answer is made of.",
        {"data": traces, "layout": arranged},
    )


def _variants(record: Record) -> dict[VariantKey, list[Trial]]:
    """Return the trials that ran by variant; the best plan's first, then the baseline's, by speed."""
    by_variant: dict[VariantKey, list[Trial]] = {}
    for trial in _ran(record):
        by_variant.setdefault(trial.plan.variant, []).append(trial)
    first = (record.best.plan.variant, record.baseline_beside_best.plan.variant)

    def order(key: VariantKey) -> tuple[int, float]:
        speeds = [trial.samples_per_second or 0.0 for trial in by_variant[key] if trial.ok]
        return (first.index(key) if key in first else len(first), -max(speeds, default=0.0))

    return {key: by_variant[key] for key in sorted(by_variant, key=order)}


def _styled(record: Record) -> Iterator[tuple[str, str, bool, list[Trial]]]:
    """Yield name, color, whether it is shown at first, and trials of each variant."""
    colors = {record.baseline_beside_best.plan.variant: BASELINE, record.best.plan.variant: BEST}
    others = 0
    for at, (key, trials) in enumerate(_variants(record).items()):
        color = colors.get(key)
        if color is None:
            color, others = VARIANTS[others % len(VARIANTS)], others + 1
        name = escape(settings_words(trials[0].plan.settings, record), quote=False)
        yield name, color, at < _MOST_LINES, trials


def _curves(
    record: Record, of: str, size: int, failed_at: float | None
) -> Iterator[dict[str, Any]]:
    """Yield the traces of each variant: measured points, and a line through them."""
    for name, color, shown, trials in _styled(record):
        fits = [t for t in trials if t.ok and t.measurement.held_bytes and t.samples_per_second]
        failed = [t for t in trials if t.measurement.outcome.about_memory]
        value = {
            "memory": lambda trial: (trial.measurement.held_bytes or 0) / size,
            "speed": lambda trial: trial.samples_per_second or 0.0,
        }[of]
        at = sorted(((t.plan.micro_batch, value(t), t) for t in fits), key=lambda each: each[:2])
        group: dict[str, Any] = {"legendgroup": name}
        if not shown:
            group["visible"] = "legendonly"
        yield (
            points(name, [(x, y) for x, y, _ in at], color, [hover_of(t, record) for *_, t in at])
            | group
        )
        through = _line_through([(x, y) for x, y, _ in at]) if of == "memory" else _means(at)
        if len(through) > 1:
            dash = {"color": color, "width": 1.5, "dash": "dot" if of == "memory" else "solid"}
            yield {
                "type": "scatter",
                "mode": "lines",
                "x": [x for x, _ in through],
                "y": [y for _, y in through],
                "line": dash,
                "hoverinfo": "skip",
                "showlegend": False,
                "opacity": 0.7,
            } | group
        if failed_at is not None and failed:
            cross = {"symbol": "x", "line": {"width": 0}}
            texts = [hover_of(t, record) for t in failed]
            places = [(t.plan.micro_batch, failed_at) for t in failed]
            hidden = {"showlegend": False, "cliponaxis": False}
            yield points(name, places, color, texts, marker=cross) | group | hidden


def _means(at: Iterable[tuple[int, float, Trial]]) -> list[tuple[float, float]]:
    by_size: dict[int, list[float]] = {}
    for x, y, _ in at:
        by_size.setdefault(x, []).append(y)
    return [(x, sum(ys) / len(ys)) for x, ys in sorted(by_size.items())]


def _line_through(at: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the ends of the straight line of least squares; [] for points of one size."""
    count = len(at)
    middle = sum(x for x, _ in at) / max(count, 1)
    spread = sum((x - middle) ** 2 for x, _ in at)
    if not spread:
        return []
    mean = sum(y for _, y in at) / count
    slope = sum((x - middle) * (y - mean) for x, y in at) / spread
    ends = (at[0][0], at[-1][0])
    return [(x, mean + slope * (x - middle)) for x in ends]


def _memory_lines(record: Record) -> Chart:
    unit, size = _scale(record)
    most = max(trial.measurement.held_bytes or 0 for trial in _ran(record))
    end, has_budget = _budget_axis(record, most, size)
    budget = record.vram_budget_bytes / size
    arranged = layout(
        380,
        xaxis=title("micro-batch, samples") | {"rangemode": "tozero"},
        yaxis=title(f"memory held, {unit}") | {"range": [0, end]},
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top", "font": {"size": 11}},
        margin={"l": 52, "r": 14, "t": 8, "b": 44},
    )
    words = f"VRAM budget {format_bytes(record.vram_budget_bytes)}"
    if has_budget:
        arranged["shapes"] = [line("y", budget)]
    arranged["annotations"] = [
        note(
            words if has_budget else f"{words} ↑",
            0,
            budget if has_budget else end,
            BUDGET,
            xref="paper",
            xanchor="left",
            yanchor="bottom" if has_budget else "top",
            xshift=6,
        )
    ]
    return Chart(
        "memory",
        "Memory by micro-batch",
        "Each point is a trial; the dotted line of a variant is the straight one through its points. "
        "A cross at the budget did not fit.",
        {
            "data": list(_curves(record, "memory", size, min(budget, end))),
            "layout": arranged,
        },
    )


def _speed_curves(record: Record) -> Chart:
    arranged = layout(
        380,
        xaxis=title("micro-batch, samples") | {"rangemode": "tozero"},
        yaxis=title("samples/s") | {"rangemode": "tozero"},
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top", "font": {"size": 11}},
        margin={"l": 52, "r": 14, "t": 8, "b": 44},
    )
    return Chart(
        "speed",
        "Speed by micro-batch",
        "Each point is a trial of the search or of the final comparison; a line joins the means of a "
        "variant at each micro-batch.",
        {"data": list(_curves(record, "speed", 1, None)), "layout": arranged},
    )


_ROLES: Mapping[Role, tuple[str, str]] = {
    Role.BASELINE: ("baseline", BASELINE),
    Role.SEARCH: ("search", TRIED),
    Role.CONFIRMED: ("final comparison", BEST),
}


def _course(record: Record) -> Chart:
    unit, size = _scale(record)
    ran = _ran(record)
    most = max(trial.measurement.held_bytes or 0 for trial in ran)
    end, has_budget = _budget_axis(record, most, size)
    traces: list[dict[str, Any]] = [_fastest_so_far(record)]
    for role, (name, color) in _ROLES.items():
        own = [trial for trial in ran if trial.role is role and trial.ok]
        at = [(trial.number, trial.samples_per_second or 0.0) for trial in own]
        traces.append(points(name, at, color, [hover_of(trial, record) for trial in own]))
        held = [(t.measurement.held_bytes or 0) / size for t in own]
        traces.append(_bars(name, own, held, color, record))
    failed = [trial for trial in ran if not trial.ok]
    cross = {"symbol": "x", "line": {"width": 0}, "size": 10}
    outcomes = sorted({trial.measurement.outcome for trial in failed}, key=list(Outcome).index)
    for outcome in outcomes:
        own = [trial for trial in failed if trial.measurement.outcome is outcome]
        color = FAILED if outcome.about_memory else BUDGET
        texts = [hover_of(trial, record) for trial in own]
        crosses = points(outcome.value, [(t.number, 0.0) for t in own], color, texts, marker=cross)
        traces.append(crosses | {"cliponaxis": False})
        held = [(t.measurement.held_bytes or 0) / size for t in own]
        traces.append(_bars(outcome.value, own, held, color, record))
    expected = [trial for trial in ran if trial.predicted_peak_bytes is not None]
    if expected:
        dash = {"symbol": "line-ew-open", "size": 11, "line": {"width": 2, "color": INK}}
        at = [(trial.number, (trial.predicted_peak_bytes or 0) / size) for trial in expected]
        texts = [hover_of(trial, record) for trial in expected]
        traces.append(points("expected memory", at, INK, texts, marker=dash) | {"yaxis": "y2"})
    last = max(trial.number for trial in ran)
    arranged = layout(
        460,
        xaxis=title("trial") | {"range": [-0.7, last + 0.7], "anchor": "y2", "tickformat": "d"},
        yaxis=title("samples/s") | {"rangemode": "tozero", "domain": [0.48, 1]},
        yaxis2=title(f"held, {unit}") | {"range": [0, end], "domain": [0, 0.38]},
        barmode="overlay",
        bargap=0.35,
    )
    if has_budget:
        arranged["shapes"] = [line("y2", record.vram_budget_bytes / size)]
    return Chart(
        "course",
        "The search as it went",
        "Above the speed of each trial, below what it held (bars) and what was expected of it "
        "(dashes), with the VRAM budget. Crosses did not run to their end.",
        {"data": traces, "layout": arranged},
    )


def _bars(
    name: str, trials: Sequence[Trial], heights: Sequence[float], color: str, record: Record
) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": [trial.number for trial in trials],
        "y": list(heights),
        "yaxis": "y2",
        "marker": {"color": color, "opacity": 0.75},
        "hovertext": [hover_of(trial, record) for trial in trials],
        "hoverinfo": "text",
        "textposition": "none",
        "showlegend": False,
    }


def _fastest_so_far(record: Record) -> dict[str, Any]:
    """Return the line of the fastest trial until each, of the search alone."""
    at: list[tuple[int, float]] = []
    fastest = 0.0
    for trial in _ran(record):
        if trial.role is Role.CONFIRMED:
            break
        if trial.ok:
            fastest = max(fastest, trial.samples_per_second or 0.0)
        if fastest:
            at.append((trial.number, fastest))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "fastest so far",
        "x": [x for x, _ in at],
        "y": [y for _, y in at],
        "line": {"shape": "hv", "color": TRIED, "width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
    }
