"""The figure of how searches and predictions grow, drawn from the newest recorded numbers.

    python -m benchmarks.scaling_figure            write it beside them

Both axes of each panel are logarithmic; a dashed line grows in proportion, through the last point
of the first curve. A test holds that the file is what this draws.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
WIDTH, HEIGHT, MARGIN = 400, 280, 56
"""Pixels of a panel, and of its edge on each side."""
COLORS = ("#1f5fa8", "#b5541c")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """What one panel shows.

    Attributes:
        rows: the name of the table in the recorded numbers.
        x: the column of the horizontal axis, and its title.
        curves: column -> name of a curve, in seconds of processor time.
    """

    rows: str
    x: tuple[str, str]
    curves: dict[str, str]


PANELS = (
    Panel(
        "settings",
        ("variants", "variants of the space"),
        {"search_s": "a search", "a_probe_s": "a probe"},
    ),
    Panel(
        "trials",
        ("trials", "trials in the study"),
        {"a_proposal_s": "a proposal", "with_the_study_s": "with reading the study"},
    ),
    Panel(
        "modules",
        ("modules", "modules of the model"),
        {"search_s": "a search of six probes", "predict_s": "a prediction"},
    ),
    Panel("parameters", ("parameters", "parameters of the model"), {"predict_s": "a prediction"}),
)


def newest() -> Path:
    """Return the newest recorded numbers."""
    return max(RESULTS.glob("*-scaling.json"))


def figure_of(numbers: Path) -> Path:
    """Return where the figure of these numbers lies."""
    return numbers.with_suffix(".svg")


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis over whole decades.

    Attributes:
        low, high: the exponents of ten at its ends.
        start, end: the pixels there.
    """

    low: int
    high: int
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Scale:
        """Return the axis with room for these values."""
        low = math.floor(math.log10(min(values)))
        return cls(low, max(low + 1, math.ceil(math.log10(max(values)))), start, end)

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def decades(self) -> Iterator[tuple[float, str]]:
        """Yield the pixel and the label of each power of ten."""
        for exponent in range(self.low, self.high + 1):
            yield self.at(10.0**exponent), f"{10.0**exponent:g}"


def drawn(told: dict[str, Any]) -> str:
    """Return the figure as SVG.

    Args:
        told: what `benchmarks.scaling --json` wrote.
    """
    columns = 2
    height = HEIGHT * -(-len(PANELS) // columns)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(PANELS):
        row, column = divmod(number, columns)
        lines.append(f'<g transform="translate({column * WIDTH} {row * HEIGHT})">')
        lines += [*panel_lines(panel, told[panel.rows]), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def panel_lines(panel: Panel, rows: Sequence[dict[str, float]]) -> Iterator[str]:
    """Yield the elements of a panel."""
    key, title = panel.x
    curves = {name: [(row[key], row[of]) for row in rows] for of, name in panel.curves.items()}
    every = [point for points in curves.values() for point in points]
    left, right, bottom, top = MARGIN, WIDTH - MARGIN / 2, HEIGHT - MARGIN, MARGIN / 2
    x = Scale.over([at for at, _ in every], left, right)
    y = Scale.over([seconds for _, seconds in every], bottom, top)
    for at, label in x.decades():
        yield f'<path d="M{at:.1f} {bottom}V{top}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
    for at, label in y.decades():
        yield f'<path d="M{left} {at:.1f}H{right}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<text x="{(left + right) / 2}" y="{bottom + 38}" text-anchor="middle">{title}</text>'
    yield f'<text x="{left}" y="{top - 10}">seconds of processor time</text>'
    last_x, last_y = next(iter(curves.values()))[-1]
    first_x = max(10.0**x.low, last_x * 10.0**y.low / last_y)
    proportional = [(first_x, last_y * first_x / last_x), (last_x, last_y)]
    yield polyline(proportional, x, y, 'stroke="#888" stroke-dasharray="4 4"')
    for number, ((name, points), color) in enumerate(zip(curves.items(), COLORS, strict=False)):
        yield polyline(points, x, y, f'stroke="{color}" stroke-width="2"')
        for at, seconds in points:
            yield f'<circle cx="{x.at(at):.1f}" cy="{y.at(seconds):.1f}" r="3" fill="{color}"/>'
        words = f'x="{left + 8}" y="{top + 16 * (number + 1)}" fill="{color}"'
        yield f"<text {words}>{escape(name)}</text>"


def polyline(points: Points, x: Scale, y: Scale, style: str) -> str:
    """Return a line through points."""
    text = " ".join(f"{x.at(at):.1f},{y.at(seconds):.1f}" for at, seconds in points)
    return f'<polyline points="{text}" fill="none" {style}/>'


if __name__ == "__main__":
    numbers = newest()
    figure_of(numbers).write_text(drawn(json.loads(numbers.read_text())))
