"""A chart as SVG that fits any width: texts keep their size, and no script is needed.

Places across are in percent, places down in pixels, so a narrow page shows the same chart, less
wide. Lines and areas lie in a part of their own that is stretched. Colours are classes of the
page's style, which has a dark form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from autofit.units import GIB, KIB, MIB, TIB

_UNITS = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}
_STRETCHED = 1000
"""Width of the coordinates of lines and areas."""
_TICKS = 5
_ROOM_PERCENT = 60
"""Right of this a label stands on the left of its point."""
_RADIUS = 5

Point = tuple[float, float]


def scale_for(most_bytes: float) -> tuple[str, int]:
    """Return the unit in which this many bytes are written, and its size."""
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
        title: for those who cannot see it.
        height: of the plot, in pixels.
        x_end, y_end: largest values.
    """

    def __init__(self, title: str, *, height: int, x_end: float, y_end: float) -> None:
        self._title = title
        self.height, self._x_end, self._y_end = height, x_end or 1.0, y_end or 1.0
        self._parts: list[str] = []

    def across(self, x: float) -> float:
        """Return where a value lies, in percent of the width."""
        return 100 * x / self._x_end

    def down(self, y: float) -> float:
        """Return where a value lies, in pixels from the top."""
        return self.height * (1 - min(y, self._y_end) / self._y_end)

    def up(self, pixels: float) -> float:
        """Return the value that lies this many pixels above the bottom."""
        return self._y_end * pixels / self.height

    def axes(self, x_title: str, y_title: str, *, x_ticks: Sequence[float] | None = None) -> None:
        """Draw the grid, the numbers on the axes and their titles."""
        for value in ticks(self._y_end):
            y = self.down(value)
            self._parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(0, y + 4, _number(value), "tick end", dx=-8)
        across = ticks(self._x_end) if x_ticks is None else x_ticks
        for value in across:
            self.text(self.across(value), self.height + 18, _number(value), "tick middle")
        self.text(0, -14, y_title, "axis", dx=-44)
        self.text(100, self.height + (34 if across else 18), x_title, "axis end")

    def text(self, percent: float, y: float, words: str, kind: str, *, dx: float = 0) -> None:
        """Draw a text whose anchor is in that kind: "end", "middle" or the start."""
        at = f'x="{percent:.2f}%" y="{y:.1f}" dx="{dx:g}"'
        self._parts.append(f'<text class="{kind}" {at}>{escape(words)}</text>')

    def upright(self, percent: float, kind: str) -> None:
        """Draw a line from top to bottom."""
        x = f'x1="{percent:.2f}%" x2="{percent:.2f}%"'
        self._parts.append(f'<line class="{kind}" {x} y1="0" y2="{self.height}"/>')

    def level(self, y: float, kind: str) -> None:
        """Draw a line from side to side."""
        ends = f'x1="0" x2="100%" y1="{self.down(y):.1f}" y2="{self.down(y):.1f}"'
        self._parts.append(f'<line class="{kind}" {ends}/>')

    def upright_between(self, x: float, low: float, high: float, kind: str) -> None:
        """Draw a line from one value up to another."""
        percent = f'x1="{self.across(x):.2f}%" x2="{self.across(x):.2f}%"'
        ends = f'y1="{self.down(low):.1f}" y2="{self.down(high):.1f}"'
        self._parts.append(f'<line class="{kind}" {percent} {ends}/>')

    def line(self, at: Iterable[Point], kind: str) -> None:
        """Draw a line through values."""
        self._stretched(f'<path class="{kind}" d="{self._path(at)}"/>')

    def areas(self, layers: Mapping[str, Sequence[float]]) -> None:
        """Draw stacked areas: by kind, a value at 0, 1, 2 and so on, each up to the next."""
        below = [0.0] * max(map(len, layers.values()), default=0)
        drawn = []
        for kind, values in layers.items():
            above = [low + value for low, value in zip(below, values, strict=True)]
            edge = [*steps(enumerate(above)), *reversed(steps(enumerate(below)))]
            drawn.append(f'<path class="{kind}" d="{self._path(edge)}Z"/>')
            below = above
        self._stretched("".join(drawn))

    def dot(self, x: float, y: float, kind: str, about: str, *, is_square: bool = False) -> None:
        """Draw a point, round or square, that says more where it is touched."""
        across, down = f"{self.across(x):.2f}%", self.down(y)
        at = f'cx="{across}" cy="{down:.1f}" r="{_RADIUS}"'
        if is_square:  # a square is moved by pixels from a place in percent
            side = 2 * _RADIUS - 1
            at = f'x="{across}" y="{down - side / 2:.1f}" width="{side}" height="{side}"'
            at += f' transform="translate({-side / 2})"'
        shape = "rect" if is_square else "circle"
        self._parts.append(f'<{shape} class="{kind}" {at}><title>{escape(about)}</title></{shape}>')

    def label(self, x: float, y: float, words: str, kind: str, *, below: bool = False) -> None:
        """Draw words beside a point, on the side where there is room."""
        percent, down = self.across(x), self.down(y) + (20 if below else -10)
        is_left = percent > _ROOM_PERCENT
        side = f"{kind} end" if is_left else kind
        self.text(percent, max(down, 12), words, side, dx=-9 if is_left else 9)

    def drawn(self) -> str:
        """Return the chart as HTML."""
        title = escape(self._title)
        return (
            f'<svg class="chart" role="img" height="{self.height}" aria-label="{title}">'
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


def steps(points: Iterable[Point]) -> list[Point]:
    """Return the corners of a line that keeps each value until the next."""
    (last, *later) = points
    corners = [last]
    for x, y in later:
        if y != last[1]:
            corners += [(x, last[1]), (x, y)]
        last = (x, y)
    return corners if corners[-1] == last else [*corners, last]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
