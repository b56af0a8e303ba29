"""The charts of a search: speed against memory, and the memory over an optimizer step.

The colour of a plan is its value of the lever that matters most for speed, as a rule the precision;
a plan that recomputes activations is a square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from autofit.dimension import Scalar
from autofit.measurement import Trial, probes_of
from autofit.plan import Plan
from autofit.report.details import PLANS, outcome_words, trial_of
from autofit.report.plot import Plot, scale_for, steps
from autofit.report.record import Record, one_a_plan
from autofit.report.summary import (
    beside_recommended,
    is_sure,
    name_of,
    plan_words,
    role_of,
    speed_words,
)
from autofit.units import counted, format_bytes

KINDS: Mapping[str, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "temporaries": "temporaries",
}
"""Kind of the memory -> its name; the class of its colour is "kind-" and the kind."""
_WIDE_BUDGET = 3.0
"""A budget this many times what any plan held is not drawn, or all points would lie at one edge."""
_BUDGET_SHARE = 0.9
"""Of the width: where the budget stands."""
_TIMELINE_ROOM = 1.4
"""Height of a timeline over its peak: room for the label of the peak and two rows of names."""
_MIN_SHARE = 0.16
"""Of the width: a narrower phase has its name in a second row, over the next phase."""
_MIN_SHOWN = 0.03
"""Of the width: the name of a still narrower phase would stand over several others."""


@dataclass(frozen=True)
class Chart:
    """A chart and the words around it.

    Attributes:
        title: what it shows.
        caption: how to read it.
        drawn: HTML.
        colours: classes of its colours, and what they mean.
    """

    title: str
    caption: str
    drawn: str
    colours: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Marks:
    """How plans are told apart in charts of speed.

    Attributes:
        setting: whose value is the colour; None: all plans have one value of every lever.
        values: of that setting, in the order of their colours.
        has_others: whether plans have more values of it than there are colours.
    """

    setting: str | None
    values: tuple[Scalar, ...] = ()
    has_others: bool = False

    @classmethod
    def of(cls, record: Record, fits: Sequence[Trial]) -> Marks:
        """Return the marks of the lever whose values differ most in the speed of their best plan.

        A record without levers takes any setting that does not recompute.
        """
        plain = {n for n, d in record.dimensions.items() if not any(map(d.recomputes, d.values))}
        levers = {name for name in plain if record.dimensions[name].lever is not None} or plain
        fastest: dict[str, dict[Scalar, float]] = {}
        for trial in fits:
            for name, value in trial.plan.settings.items():
                if name in levers:
                    of = fastest.setdefault(name, {})
                    of[value] = max(of.get(value, 0.0), record.speed_of(trial) or 0.0)
        spread = {
            n: max(of.values()) / min(of.values()) for n, of in fastest.items() if len(of) > 1
        }
        if not spread:
            return cls(None)
        setting = max(spread, key=lambda name: spread[name])
        values = tuple(v for v in record.dimensions[setting].values if v in fastest[setting])
        return cls(setting, values[:MAX_COLOURS], len(values) > MAX_COLOURS)

    def kind_of(self, plan: Plan) -> str:
        """Return the class of the plan's colour."""
        if self.setting is None:
            return "value-0"
        value = plan.settings.get(self.setting)
        return f"value-{self.values.index(value)}" if value in self.values else OTHER

    def names(self) -> dict[str, str]:
        """Return the classes of the colours with what they mean."""
        names = {f"value-{n}": f"{self.setting}={value}" for n, value in enumerate(self.values)}
        return names | ({OTHER: "another value"} if self.has_others else {})


MAX_COLOURS = 4
"""More are not told apart at a glance, on light and on dark."""
OTHER = "value-other"
"""The class of the colour of all further values."""


def speed_charts(record: Record) -> Iterator[Chart]:
    """Yield speed against memory, and speed against micro-batch where several sizes ran."""
    fits = one_a_plan(record.trials, is_compared=record.is_confirmed)
    marks = Marks.of(record, fits)
    yield _frontier_chart(record, fits, marks)
    if len({trial.plan.micro_batch for trial in fits}) > 1:
        yield _sizes_chart(record, fits, marks)


def frontier_chart(record: Record) -> Chart:
    """Return speed against memory of each plan that ran, and the budget."""
    return next(speed_charts(record))


def _frontier_chart(record: Record, fits: list[Trial], marks: Marks) -> Chart:
    budget = record.vram_budget_bytes
    failed = [t for t in probes_of(record.trials) if t.measurement.outcome.about_memory]
    most = max(map(_held, fits))
    is_near = budget <= _WIDE_BUDGET * most
    unit, size = scale_for(budget if is_near else most)
    end = (budget / _BUDGET_SHARE if is_near else 1.1 * most) / size
    plot = Plot(
        f"Speed against memory: {counted(len(fits), 'plan')} that fit",
        height=300,
        x_end=end,
        y_end=1.15 * max(record.speed_of(trial) or 0.0 for trial in fits),
    )
    plot.axes(f"memory, {unit}", "samples/s")
    edge = sorted((_held(t) / size, record.speed_of(t) or 0.0) for t in record.frontier)
    plot.line(steps(edge), "frontier" if is_sure(record) else "frontier undecided")
    if is_near:
        plot.upright(100 * _BUDGET_SHARE, "budget")
    _draw_failed(plot, failed, (_BUDGET_SHARE if is_near else 1) * end, record)
    words = f"VRAM budget {format_bytes(budget)}, {len(failed)} did not fit"
    plot.text(99.5, -14, words, "budget-words end")
    _draw_plans(plot, fits, lambda trial: _held(trial) / size, record, marks)
    return Chart(
        "Speed against memory",
        "Each point is a plan that ran, with the range of its speed; a square recomputes "
        "activations. The line is the frontier: more speed takes more memory"
        f"{'; dashed: not decided' * (not is_sure(record))}.",
        plot.drawn(),
        marks.names(),
    )


def _sizes_chart(record: Record, fits: list[Trial], marks: Marks) -> Chart:
    """Return speed against micro-batch, with a line through the fastest plans of each colour."""
    plot = Plot(
        "Speed against micro-batch",
        height=260,
        x_end=1.1 * max(trial.plan.micro_batch for trial in fits),
        y_end=1.15 * max(record.speed_of(trial) or 0.0 for trial in fits),
    )
    plot.axes("micro-batch, samples", "samples/s")
    fastest: dict[str, dict[float, float]] = {}
    for trial in fits:
        of = fastest.setdefault(marks.kind_of(trial.plan), {})
        size = float(trial.plan.micro_batch)
        of[size] = max(of.get(size, 0.0), record.speed_of(trial) or 0.0)
    for kind, of in fastest.items():
        plot.line(sorted(of.items()), f"{kind} through")
    _draw_plans(plot, fits, lambda trial: trial.plan.micro_batch, record, marks)
    caption = "The same plans by their micro-batch; lines join the fastest of each size."
    return Chart("Speed against micro-batch", caption, plot.drawn(), marks.names())


def _draw_failed(plot: Plot, failed: Sequence[Trial], x: float, record: Record) -> None:
    """Draw plans that did not fit, which have no speed, one above the other.

    They stand at the budget, or at the right end where that is far away.
    """
    for place, trial in enumerate(failed):
        about = f"{plan_words(trial.plan, record)}\ntrial {trial.number}: {outcome_words(trial)}"
        plot.dot(x, plot.up(_FAILED_PIXELS * (place + 1)), "failed", about)


def _draw_plans(
    plot: Plot,
    fits: list[Trial],
    place: Callable[[Trial], float],
    record: Record,
    marks: Marks,
) -> None:
    first, second = record.recommended, beside_recommended(record)
    pair = [trial.plan for trial in (first, second) if trial is not None]
    names = {plan: role_of(plan, record) for plan in pair}
    for trial in sorted(fits, key=lambda each: (each.plan in names, each.plan == first.plan)):
        x, y = place(trial), record.speed_of(trial) or 0.0
        kind = "baseline" if trial.plan in names else f"tried {marks.kind_of(trial.plan)}"
        kind = "best" if trial.plan == first.plan else kind  # what is recommended stands out
        plot.upright_between(x, *_seen(trial, record), "whisker")
        plot.dot(x, y, kind, _about(trial, record), is_square=_recomputes(trial.plan, record))
        if name := names.get(trial.plan):
            plot.label(x, y, name, f"{kind}-words", below=kind == "baseline")


def _recomputes(plan: Plan, record: Record) -> bool:
    known = record.dimensions
    return any(n in known and known[n].recomputes(v) for n, v in plan.settings.items())


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
        f"{plan_words(trial.plan, record)}\ntrial {trial.number}: {outcome_words(trial)}\n"
        f"{speed_words(trial, record)}\nmemory {format_bytes(trial.measurement.held_bytes)}"
    )


def standalone(chart: Chart) -> str:
    """Return a chart as an SVG document of its own, light or dark as its reader's screen is."""
    style = files("autofit.report").joinpath("page.css").read_text(encoding="utf-8")
    at = '<svg x="62" y="48" width="680" overflow="visible" class='
    keys, end = _keys(chart.colours)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart figure" width="{_FIGURE_WIDTH}" '
        f'height="{end}" viewBox="0 0 {_FIGURE_WIDTH} {end}">'
        f"<style>{style}\n.chart {{ margin: 0; width: auto; font-family: sans-serif; }}</style>"
        f'<rect class="sheet" width="100%" height="100%" rx="8"/>'
        f"{chart.drawn.replace('<svg class=', at, 1)}{keys}</svg>"
    )


def _keys(colours: Mapping[str, str]) -> tuple[str, int]:
    """Return the colours' names in rows below a figure, and where the figure then ends."""
    drawn, x, y = "", _LEFT, _KEYS_TOP
    for kind, name in colours.items():
        width = 36 + len(name) * _LETTER_PIXELS
        if x > _LEFT and x + width > _FIGURE_WIDTH:
            x, y = _LEFT, y + 20
        drawn += f'<circle class="tried {kind}" cx="{x + 5}" cy="{y}" r="5"/>'
        drawn += f'<text x="{x + 15}" y="{y + 4}">{escape(name)}</text>'
        x += width
    return drawn, y + 18


_FIGURE_WIDTH = 780
"""Pixels: what a README shows without scaling."""
_LEFT, _KEYS_TOP = 62, 414
"""Pixels: where the plot of a figure begins, and the first row of names below its axis."""
_LETTER_PIXELS = 7
"""More than the mean letter of a sans-serif font of 12 pixels takes."""
_FAILED_PIXELS = 13
"""Between two plans that did not fit: a little more than a mark is wide."""


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
        budget = record.vram_budget_bytes
        yield Chart(title, _steps_shown(trial, use, record), _timeline(title, use, most, budget))


def legend(names: Mapping[str, str]) -> str:
    """Return names with their colours, by the class of these; nothing where there are none."""
    if not names:
        return ""
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


def _timeline(title: str, use: Mapping[str, Any], most: int, budget: int) -> str:
    unit, size = scale_for(most)
    moments, peak = len(_totals(use)), max(_totals(use))
    plot = Plot(title, height=220, x_end=max(moments - 1, 1), y_end=_TIMELINE_ROOM * most / size)
    plot.axes("one optimizer step", f"allocated, {unit}", x_ticks=())
    held = {kind: use["bytes"][kind] for kind in KINDS if any(use["bytes"].get(kind, ()))}
    plot.areas({f"kind-{kind}": [each / size for each in own] for kind, own in held.items()})
    ends = [*(phase["first"] for phase in use["phases"]), moments][1:]
    for phase, end in zip(use["phases"], ends, strict=True):
        place = plot.across(phase["first"])
        plot.upright(place, "phase")
        share = (end - phase["first"]) / moments
        if share >= _MIN_SHOWN:
            row = 12 if share >= _MIN_SHARE else 26
            plot.text(place, row, phase["name"], "phase-words", dx=4)
    if budget <= _TIMELINE_ROOM * most:
        plot.level(budget / size, "budget")
    at = min(use["peak"], moments - 1)
    plot.label(at, peak / size, f"peak {format_bytes(peak)}", "peak-words")
    return plot.drawn()
