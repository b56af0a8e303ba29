"""The charts of a search as figures of plotly.js: plain data, computed from the record alone.

Bytes are divided by a power of two and nothing else, so every plotted number is one of the report
file's. Names are escaped: plotly.js reads a little HTML in texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from autofit.measurement import Outcome, Role, Trial
from autofit.plan import VariantKey
from autofit.report.answer import describe, speed_words
from autofit.report.chart_parts import (
    BASELINE,
    BEST,
    BUDGET,
    FAILED,
    INK,
    TRIED,
    Chart,
    layout,
    line,
    note,
    points,
    scale_for,
    title,
)
from autofit.report.record import Record, one_a_plan
from autofit.report.rows import outcome_words, short_settings, trial_speed
from autofit.units import format_bytes, format_seconds

VARIANTS = ("#2563eb", "#d97706", "#9333ea", "#db2777", "#0891b2", "#65a30d")
"""Colors of variants that are neither the best plan's nor plain."""
_MOST_LINES = 6
"""Variants that are shown at first; a touch on the legend shows the others."""
_WIDE_BUDGET = 3.0
"""A budget so many times what any plan held is told in words, or all points lie at one edge."""
_BUSY = "#9333ea"
_CROSS: Mapping[str, Any] = {"symbol": "x", "size": 10, "line": {"width": 0}}


def charts(record: Record) -> Iterator[Chart]:
    """Yield the charts of a search, in the order of the page."""
    yield _frontier(record)
    if record.is_confirmed and len(record.finalists) > 1:
        yield _blocks(record)
    if len({trial.plan.micro_batch for trial in _ran(record)}) > 1:
        yield _by_micro_batch(record)
    yield _course(record)


def hover_of(trial: Trial, record: Record) -> str:
    """Return what a touch on a trial shows."""
    measured = trial.measurement
    parts = [
        f"<b>{_safe(describe(trial.plan, record))}</b>",
        f"trial {trial.number}, {trial.role.value}: {_safe(outcome_words(trial))}",
    ]
    if trial.samples_per_second:
        step = format_seconds(measured.step_time_s)
        parts.append(f"{trial_speed(trial)} samples/s, {step} a step")
    if measured.held_bytes is not None:
        parts.append(f"held {format_bytes(measured.held_bytes)}")
    if measured.busy_percent is not None:
        parts.append(f"kernels ran for {measured.busy_percent} % of the time")
    if trial.predicted_peak_bytes is not None:
        parts.append(f"expected {format_bytes(trial.predicted_peak_bytes)}")
    return "<br>".join(parts)


def _safe(name: str) -> str:
    return escape(name, quote=False)


def _did_not_fit(trial: Trial) -> bool:
    return trial.measurement.outcome.about_memory


def _ran(record: Record) -> list[Trial]:
    return [trial for trial in record.trials if trial.role is not Role.VETOED]


class _Bytes:
    """The axis of held bytes: its unit, its end, and the budget on it or beyond it."""

    def __init__(self, record: Record) -> None:
        most = max(trial.measurement.held_bytes or 0 for trial in _ran(record))
        self.has_budget = record.vram_budget_bytes <= _WIDE_BUDGET * most
        top = max(most, record.vram_budget_bytes * self.has_budget, 1)
        self.unit, self.size = scale_for(top)
        self.end = 1.08 * top / self.size
        self.budget = record.vram_budget_bytes / self.size
        self.words = f"VRAM budget {format_bytes(record.vram_budget_bytes)}"

    def of(self, trial: Trial) -> float:
        """Return where a trial lies; what did not fit, at the budget or above: it wanted more."""
        held = (trial.measurement.held_bytes or 0) / self.size
        return min(max(held, self.budget), self.end) if _did_not_fit(trial) else held


def _frontier(record: Record) -> Chart:
    held = _Bytes(record)
    fits, baseline = one_a_plan(record.trials), record.baseline_beside_best

    def place(trial: Trial) -> tuple[float, float]:
        return held.of(trial), record.speed_of(trial) or 0.0

    edge = [place(trial) for trial in reversed(record.frontier)]
    named = {record.best.plan, baseline.plan}
    others = [trial for trial in fits if trial.plan not in named]
    failed = list(filter(_did_not_fit, _ran(record)))
    line_of_edge = {
        "type": "scatter",
        "mode": "lines",
        "name": "frontier",
        "x": [x for x, _ in edge],
        "y": [y for _, y in edge],
        "line": {"shape": "hv", "color": BEST, "width": 2},
        "hoverinfo": "skip",
    }
    traces = [
        line_of_edge,
        points("plan", map(place, others), TRIED, [hover_of(t, record) for t in others]),
    ]
    if failed:
        crosses = [(held.of(trial), 0.0) for trial in failed]
        texts = [hover_of(trial, record) for trial in failed]
        traces.append(points("does not fit", crosses, FAILED, texts, marker=_CROSS) | _UNCUT)
    best = next(trial for trial in fits if trial.plan == record.best.plan)
    if baseline.ok and baseline.plan != best.plan:
        marker = {"symbol": "diamond", "size": 13}
        hover = [hover_of(baseline, record)]
        traces.append(points("baseline", [place(baseline)], BASELINE, hover, marker=marker))
    name = "best, the baseline" if best.plan == baseline.plan else "best"
    marker = {"symbol": "star", "size": 17}
    traces.append(points(name, [place(best)], BEST, [hover_of(best, record)], marker=marker))
    top = 1.14 * max(place(trial)[1] for trial in fits)
    arranged = layout(
        380,
        xaxis=title(f"memory held, {held.unit}") | {"range": [0, held.end]},
        yaxis=title("samples/s") | {"range": [0, top]},
    )
    at_right = {"xanchor": "right", "yanchor": "top"}
    if held.has_budget:
        arranged["shapes"] = [line("x", held.budget)]
        words = note(held.words, held.budget, top, BUDGET, xshift=-4, **at_right)
    else:
        words = note(f"{held.words} →", 1, top, BUDGET, xref="paper", **at_right)
    arranged["annotations"] = [words]
    return Chart(
        "frontier",
        "Speed against memory",
        "Each point is a plan that was run. Nothing was found above the line and to its left: more "
        "speed takes more memory. Held is peak reserved plus non-torch.",
        {"data": traces, "layout": arranged},
    )


_UNCUT: dict[str, Any] = {"cliponaxis": False}
"""For points on an axis."""


def _blocks(record: Record) -> Chart:
    finalists, baseline = record.finalists, record.baseline_beside_best.plan
    named = {record.best.plan: ("best", BEST)}
    named.setdefault(baseline, ("baseline", BASELINE))
    traces, notes = [], []
    for row, (plan, speed) in enumerate(reversed(finalists)):
        name, color = named.get(plan, ("", TRIED))
        blocks = record.blocks(plan)
        at = [(trial.samples_per_second or 0.0, row) for trial in blocks]
        traces.append(points(name, at, color, [hover_of(t, record) for t in blocks]))
        bar = {"symbol": "line-ns-open", "size": 22, "line": {"color": color, "width": 3}}
        median = [f"median {speed_words(blocks[0], record)}"]
        traces.append(points(name, [(speed, row)], color, median, marker=bar))
        mark = f" <b>({'best, the baseline' if plan == baseline == record.best.plan else name})</b>"
        size = replace(plan, settings={})
        label = _safe(f"{size}, {short_settings(plan.settings, record)}") + mark * bool(name)
        at_left = {"xref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": 10}
        notes.append(note(label, 0, row, INK, **at_left))
    arranged = layout(
        70 + 58 * len(finalists),
        xaxis=title("samples/s") | {"rangemode": "tozero"},
        yaxis={
            "showticklabels": False,
            "ticks": "",
            "showgrid": False,
            "range": [-0.5, len(finalists) - 0.25],
        },
        showlegend=False,
        annotations=notes,
        margin={"l": 14, "r": 14, "t": 8, "b": 44},
    )
    return Chart(
        "blocks",
        "The final comparison",
        "The leading plans and the baseline took turns. Each point is a block, run in a fresh "
        "worker; each bar is the median that the answer is made of.",
        {"data": traces, "layout": arranged},
    )


def _variants(record: Record) -> dict[VariantKey, list[Trial]]:
    """Return the trials that ran by variant: the best plan's, the baseline's, others by speed."""
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
        name = _safe(short_settings(trials[0].plan.settings, record))
        yield name, color, at < _MOST_LINES, trials


def _by_micro_batch(record: Record) -> Chart:
    held = _Bytes(record)
    traces: list[dict[str, Any]] = []
    for name, color, is_shown, trials in _styled(record):
        group: dict[str, Any] = {"legendgroup": name, "showlegend": False}
        group |= {} if is_shown else {"visible": "legendonly"}
        fits = [t for t in trials if t.ok and t.measurement.held_bytes and t.samples_per_second]
        over = list(filter(_did_not_fit, trials))
        rates = _places(fits, lambda trial: trial.samples_per_second or 0.0)
        sizes = _places(fits, held.of)
        texts = [hover_of(trial, record) for trial in fits]
        traces.append(points(name, rates, color, texts) | group | {"showlegend": True})
        traces.append(_joined(_means(rates), color, "solid", "y") | group)
        traces.append(points(name, sizes, color, texts) | group | {"yaxis": "y2"})
        traces.append(_joined(_line_through(sizes), color, "dot", "y2") | group)
        if over:
            texts = [hover_of(trial, record) for trial in over]
            crosses = points(name, _places(over, held.of), color, texts, marker=_CROSS)
            traces.append(crosses | group | _UNCUT | {"yaxis": "y2"})
    arranged = layout(
        560,
        xaxis=title("micro-batch, samples") | {"rangemode": "tozero", "anchor": "y2"},
        yaxis=title("samples/s") | {"rangemode": "tozero", "domain": [0.53, 1]},
        yaxis2=title(f"held, {held.unit}") | {"range": [0, held.end], "domain": [0, 0.47]},
    )
    at_left = {"xref": "paper", "xanchor": "left", "yref": "y2", "xshift": 6}
    if held.has_budget:
        arranged["shapes"] = [line("y2", held.budget)]
        words = note(held.words, 0, held.budget, BUDGET, yanchor="top", **at_left)
    else:
        words = note(f"{held.words} ↑", 0, held.end, BUDGET, yanchor="top", **at_left)
    arranged["annotations"] = [words]
    return Chart(
        "micro_batch",
        "Speed and memory of each setting by micro-batch",
        "Each point is a trial. Above, a line joins the mean speeds of a setting; below, a dotted "
        "one is the straight line through what it held. A cross, at the budget or above, did not "
        "fit. A touch on a name hides or shows it.",
        {"data": traces, "layout": arranged},
    )


def _places(trials: Iterable[Trial], value: Callable[[Trial], float]) -> list[tuple[float, float]]:
    return [(trial.plan.micro_batch, value(trial)) for trial in trials]


def _joined(at: Sequence[tuple[float, float]], color: str, dash: str, yaxis: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for x, _ in at],
        "y": [y for _, y in at],
        "yaxis": yaxis,
        "line": {"color": color, "width": 1.5, "dash": dash},
        "hoverinfo": "skip",
        "opacity": 0.7,
    }


def _means(at: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    by_size: dict[float, list[float]] = {}
    for x, y in at:
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
    ends = (min(x for x, _ in at), max(x for x, _ in at))
    return [(x, mean + slope * (x - middle)) for x in ends]


_ROLES: Mapping[Role, tuple[str, str]] = {
    Role.BASELINE: ("baseline", BASELINE),
    Role.SEARCH: ("search", TRIED),
    Role.CONFIRMED: ("final comparison", BEST),
}


def _course(record: Record) -> Chart:
    held, ran = _Bytes(record), _ran(record)
    traces: list[dict[str, Any]] = [_fastest_so_far(record)]
    for role, (name, color) in _ROLES.items():
        own = [trial for trial in ran if trial.role is role and trial.ok]
        if own:
            at = [(trial.number, trial.samples_per_second or 0.0) for trial in own]
            traces.append(points(name, at, color, [hover_of(trial, record) for trial in own]))
            traces.append(_bars(name, own, held, color, record))
    failed = [trial for trial in ran if not trial.ok]
    for outcome in [each for each in Outcome if each in {t.measurement.outcome for t in failed}]:
        own = [trial for trial in failed if trial.measurement.outcome is outcome]
        color = FAILED if outcome.about_memory else BUDGET
        texts = [hover_of(trial, record) for trial in own]
        at = [(trial.number, 0.0) for trial in own]
        traces.append(points(outcome.value, at, color, texts, marker=_CROSS) | _UNCUT)
        if outcome.about_memory:
            at = [(trial.number, held.of(trial)) for trial in own]
            crosses = points(outcome.value, at, color, texts, marker=_CROSS)
            traces.append(crosses | _UNCUT | {"yaxis": "y2", "showlegend": False})
        else:
            traces.append(_bars(outcome.value, own, held, color, record))
    if expected := [trial for trial in ran if trial.predicted_peak_bytes is not None]:
        dash = {"symbol": "line-ew-open", "size": 11, "line": {"width": 2, "color": INK}}
        at = [(trial.number, (trial.predicted_peak_bytes or 0) / held.size) for trial in expected]
        texts = [hover_of(trial, record) for trial in expected]
        traces.append(points("expected", at, INK, texts, marker=dash) | {"yaxis": "y2"})
    last = max(trial.number for trial in ran)
    known = [trial for trial in ran if trial.measurement.busy_percent is not None]
    lowest = 0.26 * bool(known)  # the room for utilization below

    def place(low: float, high: float) -> dict[str, Any]:
        return {"domain": [lowest + (1 - lowest) * low, lowest + (1 - lowest) * high]}

    arranged = layout(
        580 if known else 460,
        xaxis=title("trial")
        | {"range": [-0.7, last + 0.7], "tick0": 0, "dtick": -(-last // 12) or 1},
        yaxis=title("samples/s") | {"rangemode": "tozero"} | place(0.47, 1),
        yaxis2=title(f"held, {held.unit}") | {"range": [0, held.end]} | place(0, 0.39),
        barmode="overlay",
        bargap=0.35,
    )
    arranged["xaxis"]["anchor"] = "y3" if known else "y2"
    if known:
        at = [(trial.number, float(trial.measurement.busy_percent or 0)) for trial in known]
        texts = [hover_of(trial, record) for trial in known]
        traces.append(points("GPU busy", at, _BUSY, texts) | {"yaxis": "y3"})
        axis = {"range": [0, 105], "domain": [0, 0.18]}
        arranged["yaxis3"] = arranged["yaxis2"] | title("GPU busy, %") | axis
    if held.has_budget:
        arranged["shapes"] = [line("y2", held.budget)]
    return Chart(
        "course",
        "The search as it went",
        "Above, the speed of each trial; below, what it held (bars), what was expected of it "
        "(dashes), and the VRAM budget. Crosses did not run to their end; below, they did not fit."
        + " At the bottom, the share of the time in which kernels ran."
        * bool(known),
        {"data": traces, "layout": arranged},
    )


def _bars(
    name: str, trials: Sequence[Trial], held: _Bytes, color: str, record: Record
) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": [trial.number for trial in trials],
        "y": [held.of(trial) for trial in trials],
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
