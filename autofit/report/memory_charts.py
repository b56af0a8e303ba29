"""Where the memory of the best plan and of the baseline goes, as figures of plotly.js.

A timeline of an optimizer step by kind, and the parts of the model that hold most at its peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from autofit.measurement import Trial
from autofit.report.answer import describe
from autofit.report.chart_parts import INK, MUTED, Chart, layout, line, note, scale_for, title
from autofit.report.record import Record
from autofit.units import counted, format_bytes

KINDS: Mapping[str, tuple[str, str]] = {
    "weights": ("weights", "#1e3a5f"),
    "gradients": ("gradients", "#2f6db5"),
    "optimizer_state": ("optimizer state", "#8fb8de"),
    "activations": ("activations", "#e08e2b"),
    "temporaries": ("temporaries", "#f3cf7a"),
    "rest": ("rest", "#cbd5e1"),
}
"""Kind of the report -> its name and color."""
ABOUT_KINDS = (
    "Activations are kept from a forward for its backward; temporaries live within one phase, what "
    "checkpointing computes again among them; the rest is workspaces of libraries."
)


def memory_charts(record: Record) -> Iterator[Chart]:
    """Yield a timeline and a division of each plan whose memory was looked at."""
    known = {key: use for key, use in _plans(record) if "why_not" not in use}
    most = max(
        (max(map(sum, zip(*use["bytes"].values(), strict=True))) for use in known.values()),
        default=0,
    )
    for key, use in known.items():
        yield _timeline(record, key, use, most)
    for key, use in known.items():
        yield _modules(record, key, use)


def not_looked_at(record: Record) -> Iterator[str]:
    """Yield why the memory of a plan is not shown."""
    for key, use in _plans(record):
        if "why_not" in use:
            yield f"The memory of the {_NAMES[key]} is not shown: {use['why_not']}"


_LEAST_MOMENTS = 4
"""Shorter phases, as between the last backward and the update, get no mark."""
_NAMES = {"baseline": "baseline", "best": "best plan"}


def _plans(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from ((key, record.memory[key]) for key in _NAMES if key in record.memory)


def _trial(record: Record, key: str) -> Trial:
    return record.best if key == "best" else record.baseline_beside_best


def _timeline(record: Record, key: str, use: Mapping[str, Any], most_bytes: int) -> Chart:
    unit, size = scale_for(most_bytes)
    moments = len(next(iter(use["bytes"].values())))
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": escape(KINDS.get(kind, (kind, MUTED))[0], quote=False),
            "x": list(range(moments)),
            "y": [each / size for each in held],
            "stackgroup": "memory",
            "line": {"width": 0.5, "color": KINDS.get(kind, (kind, MUTED))[1], "shape": "hv"},
            "fillcolor": KINDS.get(kind, (kind, MUTED))[1],
            "hovertemplate": f"%{{y:.3~f}} {unit}",
        }
        for kind, held in use["bytes"].items()
        if any(held)
    ]
    peak = use["peak"]
    total = sum(held[peak] for held in use["bytes"].values())
    top = 1.4 * most_bytes / size
    arranged = layout(
        340,
        xaxis=title("one optimizer step, by allocations") | {"showticklabels": False, "ticks": ""},
        yaxis=title(f"allocated, {unit}") | {"range": [0, top]},
        hovermode="x unified",
    )
    arranged["xaxis"] |= {"range": [0, moments - 1], "showgrid": False, "hoverformat": "d"}
    at_peak = {"showarrow": True, "arrowhead": 0, "arrowwidth": 1, "ax": 0, "ay": -16}
    side = "left" if peak < moments / 2 else "right"
    words = f"peak {format_bytes(total)}"
    arranged["annotations"] = [note(words, peak, total / size, INK, xanchor=side, **at_peak)]
    upright = {"yref": "paper", "textangle": -90, "xanchor": "left", "yanchor": "top"}
    ends = [*(phase["first"] for phase in use["phases"]), moments][1:]
    for phase, end in zip(use["phases"], ends, strict=True):
        first, name = phase["first"], escape(phase["name"], quote=False)
        if end - first >= _LEAST_MOMENTS:
            arranged["shapes"].append(line("x", first, "#94a3b8") | {"layer": "above"})
            arranged["annotations"].append(note(name, first, 1, MUTED, **upright))
    plan, shown = _trial(record, key).plan, min(_trial(record, key).plan.accumulation_steps, 2)
    of = f", {shown} of its {counted(plan.accumulation_steps, 'micro-batch')}"
    return Chart(
        f"timeline_{key}",
        f"Memory over a step: the {_NAMES[key]}",
        f"{describe(plan, record)}{of * (plan.accumulation_steps > 2)}, by "
        f"{_HOW.get(use['how'], use['how'])}; the probe's peak was "
        f"{format_bytes(_trial(record, key).measurement.peak_allocated_bytes)}.",
        {"data": traces, "layout": arranged},
    )


_HOW = {
    "dry run": "a dry run on the meta device",
    "real steps": "real steps whose every allocation was seen",
}


def _modules(record: Record, key: str, use: Mapping[str, Any]) -> Chart:
    parts = list(reversed(use["modules"]))
    unit, size = scale_for(max(sum(part["bytes"].values()) for part in parts))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": list(range(len(parts))),
            "x": [part["bytes"].get(kind, 0) / size for part in parts],
            "marker": {"color": color},
            "width": 0.42,
            "hovertemplate": f"{name} %{{x:.3~f}} {unit}<extra></extra>",
        }
        for kind, (name, color) in KINDS.items()
        if any(part["bytes"].get(kind) for part in parts)
    ]
    at_left = {"xref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": 6}
    notes = [
        note(f"{_label(part)}  <b>{format_bytes(sum(part['bytes'].values()))}</b>", 0, row, INK)
        | at_left
        for row, part in enumerate(parts)
    ]
    arranged = layout(
        110 + 40 * len(parts),
        xaxis=title(f"allocated at the peak, {unit}"),
        yaxis={"visible": False, "range": [-0.5, len(parts) - 0.2]},
        barmode="stack",
        annotations=notes,
        margin={"l": 6, "r": 14, "t": 34, "b": 44},
    )
    return Chart(
        f"modules_{key}",
        f"Who holds it at the peak: the {_NAMES[key]}",
        describe(_trial(record, key).plan, record),
        {"data": traces, "layout": arranged},
    )


def _label(part: Mapping[str, Any]) -> str:
    name = f"{part['name']} " if part["name"] else ""
    count = f", {part['count']} of them" if part["count"] > 1 else ""
    return escape(f"{name}({part['class']}{count})", quote=False)
