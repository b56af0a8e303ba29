"""Charts as SVG that fits any width: texts keep their size, and no script is needed.

Places across are in percent, places down in pixels, so a narrow page shows the same chart, less
wide. Lines and areas lie in a part of their own that is stretched. Colours are classes of the
page's style, which has a dark form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from autofit.units import GIB, KIB, MIB, TIB

_UNITS = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}
_STRETCHED = 1000
"""Width of the coordinates of lines and areas."""
_TICKS = 5
_ROOM_PERCENT = 60
"""Right of this a label stands on the left of its point."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """A chart and the words around it.

    Attributes:
        name: of its place on the page.
        title: what it shows.
        caption: how to read it.
        drawn: HTML.
    """

    name: str
    title: str
    caption: str
    drawn: str


def scale_for(most_bytes: float) -> tuple[str, int]:
    """Return the unit in which so many bytes are written, and its size."""
    return next((unit for unit in _UNITS.items() if most_bytes >= unit[1]), ("B", 1))


def ticks(end: float) -> list[float]:
    """Return round numbers from 0 to at most `end`."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / _TICKS))
    step = next(power * each for each in (1, 2, 5, 10) if power * each * _TICKS >= end * 0.999)
    return [at * step for at in range(int(end / step * 1.001) + 1)]


class Plot:
    """A chart that is being drawn; both axes begin at 0.

    Args:
        name: of its place on the page.
        title, about: for those who cannot see it.
        height: of the plot, in pixels.
        x_end, y_end: largest values.
        x_share: percent of the width that lie below `x_end`; the rest is beyond the axis.
    """

    def __init__(
        self,
        name: str,
        title: str,
        about: str,
        *,
        height: int,
        x_end: float,
        y_end: float,
        x_share: float = 100.0,
    ) -> None:
        self._name, self._title, self._about = name, title, about
        self.height, self._x_end, self._y_end = height, x_end or 1.0, y_end or 1.0
        self._x_share = x_share
        self._parts: list[str] = []

    def across(self, x: float) -> float:
        """Return where a value lies, in percent of the width."""
        return self._x_share * x / self._x_end

    def down(self, y: float) -> float:
        """Return where a value lies, in pixels from the top."""
        return self.height * (1 - min(y, self._y_end) / self._y_end)

    def axes(self, x_title: str, y_title: str, *, x_ticks: Sequence[float] | None = None) -> None:
        """Draw the grid, the numbers on the axes and their titles."""
        for value in ticks(self._y_end):
            y = self.down(value)
            self._parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(0, y + 4, _number(value), "tick end", dx=-8)
        across = ticks(self._x_end) if x_ticks is None else x_ticks
        for value in across:
            self.text(self.across(value), self.height + 18, _number(value), "tick middle")
        self.text(0, -10, y_title, "axis", dx=-44)
        self.text(100, self.height + (34 if across else 18), x_title, "axis end")

    def text(self, percent: float, y: float, words: str, kind: str, *, dx: float = 0) -> None:
        """Draw a text whose anchor is in that kind: "end", "middle" or the start."""
        shift = f' dx="{dx:g}"' if dx else ""
        self._parts.append(
            f'<text class="{kind}" x="{percent:.2f}%" y="{y:.1f}"{shift}>{escape(words)}</text>'
        )

    def upright(self, percent: float, kind: str) -> None:
        """Draw a line from top to bottom."""
        x = f'x1="{percent:.2f}%" x2="{percent:.2f}%"'
        self._parts.append(f'<line class="{kind}" {x} y1="0" y2="{self.height}"/>')

    def level(self, y: float, kind: str, words: str, percent: float) -> None:
        """Draw a line across at a value, with words above it."""
        at = self.down(y)
        self._parts.append(f'<line class="{kind}" x1="0" x2="100%" y1="{at:.1f}" y2="{at:.1f}"/>')
        side = " end" if percent > _ROOM_PERCENT else ""
        self.text(percent, at - 6, words, f"{kind}-words{side}")

    def zone(self, percent: float, kind: str) -> None:
        """Fill what lies to the right of a place."""
        self._parts.append(
            f'<rect class="{kind}" x="{percent:.2f}%" y="0" width="{100 - percent:.2f}%" '
            f'height="{self.height}"/>'
        )

    def line(self, at: Iterable[Point], kind: str) -> None:
        """Draw a line through values."""
        self._stretched(f'<path class="{kind}" d="{self._path(at)}"/>')

    def areas(self, layers: Mapping[str, Sequence[float]]) -> None:
        """Draw stacked areas: by kind, a value at 0, 1, 2 and so on, each up to the next."""
        below = [0.0] * max(map(len, layers.values()), default=0)
        drawn = []
        for kind, values in layers.items():
            above = [low + value for low, value in zip(below, values, strict=True)]
            edge = [*_steps(above), *reversed(_steps(below))]
            drawn.append(f'<path class="{kind}" d="{self._path(edge)}Z"/>')
            below = above
        self._stretched("".join(drawn))

    def dot(self, at: Point, kind: str, about: str, *, radius: float = 4.5) -> None:
        """Draw a point that says more where it is touched."""
        x, y = self.across(at[0]), self.down(at[1])
        self._parts.append(
            f'<circle class="{kind}" cx="{x:.2f}%" cy="{y:.1f}" r="{radius:g}">'
            f"<title>{escape(about)}</title></circle>"
        )

    def bar(self, x: float, low: float, high: float, kind: str) -> None:
        """Draw an upright line between two values."""
        at = f'x1="{self.across(x):.2f}%" x2="{self.across(x):.2f}%"'
        ends = f'y1="{self.down(low):.1f}" y2="{self.down(high):.1f}"'
        self._parts.append(f'<line class="{kind}" {at} {ends}/>')

    def cross(self, percent: float, y: float, kind: str, about: str) -> None:
        """Draw a cross at a place."""
        self._parts.append(
            f'<svg class="cross" x="{percent:.2f}%" y="{y:.1f}"><path class="{kind}" '
            f'd="M-4-4L4 4M-4 4L4-4"><title>{escape(about)}</title></path></svg>'
        )

    def label(self, at: Point, words: str, kind: str, *, below: bool = False) -> None:
        """Draw words beside a point, on the side where there is room."""
        percent = self.across(at[0])
        is_left = percent > _ROOM_PERCENT
        y = self.down(at[1]) + (20 if below else -10)
        side = f"{kind} end" if is_left else kind
        self.text(percent, max(y, 12), words, side, dx=-9 if is_left else 9)

    def drawn(self) -> str:
        """Return the chart as HTML."""
        return (
            f'<svg class="chart" role="img" height="{self.height}" '
            f'aria-labelledby="{self._name}-title {self._name}-about">'
            f'<title id="{self._name}-title">{escape(self._title)}</title>'
            f'<desc id="{self._name}-about">{escape(self._about)}</desc>'
            f"{''.join(self._parts)}</svg>"
        )

    def _stretched(self, paths: str) -> None:
        self._parts.append(
            f'<svg width="100%" height="{self.height}" viewBox="0 0 {_STRETCHED} {self.height}" '
            f'preserveAspectRatio="none">{paths}</svg>'
        )

    def _path(self, at: Iterable[Point]) -> str:
        places = (f"{self.across(x) * _STRETCHED / 100:.1f} {self.down(y):.1f}" for x, y in at)
        return f"M{'L'.join(places)}"


def _steps(values: Sequence[float]) -> list[Point]:
    """Return the corners of a line that keeps each value until the next."""
    corners: list[Point] = []
    for at, value in enumerate(values):
        if corners and corners[-1][1] != value:
            corners.append((at, corners[-1][1]))
        if not corners or corners[-1][1] != value or at == len(values) - 1:
            corners.append((at, value))
    return corners


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
