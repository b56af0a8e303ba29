"""The charts of a search: speed against memory, and the memory over an optimizer step.

They are SVG that fits any width: texts keep their size, and no script is needed. Places across are
in percent, places down in pixels, so a narrow page shows the same chart, less wide. Lines and areas
lie in a part of their own that is stretched. Colours are classes of the page's style, which has a
dark form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from autofit.measurement import Trial, probes_of
from autofit.report.details import PLANS, outcome_words, trial_of
from autofit.report.record import Record, one_a_plan
from autofit.report.summary import (
    beside_recommended,
    describe,
    is_sure,
    name_of,
    plan_words,
    role_of,
    speed_words,
)
from autofit.units import GIB, KIB, MIB, TIB, counted, format_bytes

KINDS: Mapping[str, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "temporaries": "temporaries",
}
"""Kind of the memory -> its name; the class of its colour is "kind-" and the kind."""
_WIDE_BUDGET = 3.0
"""A budget so many times what any plan held is not drawn, or all points would lie at one edge."""
_BUDGET_SHARE = 0.9
"""Of the width: where the budget stands."""
_LEAST_SHARE = 0.14
"""Of the width that a phase needs for its name."""
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
        title: what it shows.
        caption: how to read it.
        drawn: HTML.
    """

    title: str
    caption: str
    drawn: str


def frontier_chart(record: Record) -> Chart:
    """Return speed against memory of each plan that ran, and the budget."""
    fits = one_a_plan(record.trials, is_compared=record.is_confirmed)
    budget = record.vram_budget_bytes
    failed = sum(t.measurement.outcome.about_memory for t in probes_of(record.trials))
    most = max(map(_held, fits))
    is_near = budget <= _WIDE_BUDGET * most
    unit, size = scale_for(budget if is_near else most)
    plot = Plot(
        f"Speed against memory: {counted(len(fits), 'plan')} that fit",
        height=300,
        x_end=(budget / _BUDGET_SHARE if is_near else 1.1 * most) / size,
        y_end=1.15 * max(record.speed_of(trial) or 0.0 for trial in fits),
    )
    plot.axes(f"memory, {unit}", "samples/s")
    edge = sorted((_held(t) / size, record.speed_of(t) or 0.0) for t in record.frontier)
    plot.line(_steps(edge), "frontier" if is_sure(record) else "frontier undecided")
    if is_near:
        plot.upright(100 * _BUDGET_SHARE, "budget")
    words = f"VRAM budget {format_bytes(budget)}, {failed} did not fit"
    plot.text(99.5, -10, words, "budget-words end")
    _draw_plans(plot, fits, size, record)
    return Chart(
        "Speed against memory",
        "Each point is a plan that ran, with the range of its speed. The line is the frontier: "
        f"more speed takes more memory{'; dashed: not decided' * (not is_sure(record))}.",
        plot.drawn(),
    )


def _draw_plans(plot: Plot, fits: list[Trial], size: int, record: Record) -> None:
    first, second = record.recommended, beside_recommended(record)
    pair = [trial.plan for trial in (first, second) if trial is not None]
    names = {plan: role_of(plan, record) for plan in pair}
    for trial in sorted(fits, key=lambda each: (each.plan in names, each.plan == first.plan)):
        x, y = _held(trial) / size, record.speed_of(trial) or 0.0
        kind = "baseline" if trial.plan in names else "tried"
        kind = "best" if trial.plan == first.plan else kind  # what is recommended stands out
        plot.upright_between(x, *_seen(trial, record), "whisker")
        plot.dot(x, y, kind, _about(trial, record))
        if name := names.get(trial.plan):
            plot.label(x, y, name, f"{kind}-words", below=kind == "baseline")


def _seen(trial: Trial, record: Record) -> tuple[float, float]:
    """Return the range of a plan's speed; where no comparison ended, all that its probes saw."""
    ran = [t for t in probes_of(record.trials) if t.plan == trial.plan and t.samples_per_second]
    ranges = [record.speed_range(trial)]
    if not record.is_confirmed:
        ranges = [(t.samples_per_second_low, t.samples_per_second_high) for t in ran]
    return min(low or 0.0 for low, _ in ranges), max(high or 0.0 for _, high in ranges)


def _held(trial: Trial) -> int:
    return trial.measurement.held_bytes or 0


def _about(trial: Trial, record: Record) -> str:
    return (
        f"{describe(trial.plan, record)}\ntrial {trial.number}: {outcome_words(trial)}\n"
        f"{speed_words(trial, record)}\nmemory {format_bytes(trial.measurement.held_bytes)}"
    )


def memory_charts(record: Record) -> Iterator[Chart]:
    """Yield the memory of the best plan and of the baseline over a step."""
    known = {
        key: record.memory[key]
        for key in PLANS
        if key in record.memory and "why_not" not in record.memory[key]
    }
    most = max((max(_totals(use)) for use in known.values()), default=0)
    for key, use in known.items():
        trial = trial_of(key, record)
        title = f"Memory over a step: {name_of(trial.plan, record)}"
        yield Chart(title, _steps_shown(trial, use, record), _timeline(title, use, most))


def legend(names: Mapping[str, str]) -> str:
    """Return names with their colours, by the class of these."""
    items = (
        f'<li><i class="swatch {kind}"></i>{escape(name)}</li>' for kind, name in names.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _totals(use: Mapping[str, Any]) -> list[int]:
    return list(map(sum, zip(*use["bytes"].values(), strict=True)))


def _steps_shown(trial: Trial, use: Mapping[str, Any], record: Record) -> str:
    steps, how = trial.plan.accumulation_steps, use["how"]
    words = plan_words(trial.plan, record)
    part = f", 2 of {steps} micro-batches" if steps > 2 else ""
    return f"{words}{part}. {'Simulated' if how == 'dry run' else 'Seen in a real step'}."


def _timeline(title: str, use: Mapping[str, Any], most: int) -> str:
    unit, size = scale_for(most)
    moments, peak = len(_totals(use)), max(_totals(use))
    plot = Plot(title, height=220, x_end=max(moments - 1, 1), y_end=1.22 * most / size)
    plot.axes("one optimizer step", f"allocated, {unit}", x_ticks=())
    held = {kind: use["bytes"][kind] for kind in KINDS if any(use["bytes"].get(kind, ()))}
    plot.areas({f"kind-{kind}": [each / size for each in own] for kind, own in held.items()})
    ends = [*(phase["first"] for phase in use["phases"]), moments][1:]
    for phase, end in zip(use["phases"], ends, strict=True):
        place = plot.across(phase["first"])
        plot.upright(place, "phase")
        if end - phase["first"] >= _LEAST_SHARE * moments:
            plot.text(place, 12, phase["name"], "phase-words", dx=6)
    at = min(use["peak"], moments - 1)
    plot.label(at, peak / size, f"peak {format_bytes(peak)}", "peak-words")
    return plot.drawn()


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
        at = f'x="{percent:.2f}%" y="{y:.1f}" dx="{dx:g}"'
        self._parts.append(f'<text class="{kind}" {at}>{escape(words)}</text>')

    def upright(self, percent: float, kind: str) -> None:
        """Draw a line from top to bottom."""
        x = f'x1="{percent:.2f}%" x2="{percent:.2f}%"'
        self._parts.append(f'<line class="{kind}" {x} y1="0" y2="{self.height}"/>')

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
            edge = [*_steps(enumerate(above)), *reversed(_steps(enumerate(below)))]
            drawn.append(f'<path class="{kind}" d="{self._path(edge)}Z"/>')
            below = above
        self._stretched("".join(drawn))

    def dot(self, x: float, y: float, kind: str, about: str) -> None:
        """Draw a point that says more where it is touched."""
        self._parts.append(
            f'<circle class="{kind}" cx="{self.across(x):.2f}%" cy="{self.down(y):.1f}" r="5">'
            f"<title>{escape(about)}</title></circle>"
        )

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


def _steps(points: Iterable[Point]) -> list[Point]:
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
