"""What the charts of a report have in common: style, axes, points, lines and notes of plotly.js."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autofit.units import GIB, KIB, MIB, TIB

Figure: TypeAlias = dict[str, Any]
"""{"data": traces, "layout": layout}, as `Plotly.newPlot` takes them."""

INK, MUTED, GRID = "#1e293b", "#64748b", "#e2e8f0"
BEST, BASELINE, TRIED, FAILED, BUDGET = "#0f766e", "#64748b", "#60a5fa", "#dc2626", "#b45309"
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
