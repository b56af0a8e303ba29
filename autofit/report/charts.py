"""The charts of a search: speed against memory, and the memory over an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from autofit.measurement import Trial, probes_of
from autofit.report.details import outcome_words
from autofit.report.record import Record, one_a_plan
from autofit.report.summary import describe, plan_words, speed_ends, speed_words
from autofit.report.svg import Chart, Plot, scale_for
from autofit.units import counted, format_bytes

KINDS: Mapping[str, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "temporaries": "temporaries",
    "rest": "rest",
}
"""Kind of the memory -> its name; the class of its colour is "kind-" and the kind."""
_NAMES = {"best": "best plan", "baseline": "baseline"}
_WIDE_BUDGET = 3.0
"""A budget so many times what any plan held lies beyond the axis, or all points lie at one edge."""
_BUDGET_AT = 86.0
"""Percent of the width where the budget stands; what did not fit lies to its right."""
_BREAK_AT = 78.0
"""Percent of the width of an axis that ends before the budget."""
_LEAST_SHARE = 0.14
"""Of the width that a phase needs for its name."""
_MOST_MODULES = 6
_MOST_CROSSES = 30


def frontier_chart(record: Record) -> Chart:
    """Return speed against memory of each plan that ran, and the budget."""
    ran = probes_of(record.trials)
    fits, failed = one_a_plan(record.trials), [t for t in ran if t.measurement.outcome.about_memory]
    most, budget = max(map(_held, fits)), record.vram_budget_bytes
    is_near = budget <= _WIDE_BUDGET * most
    unit, size = scale_for(budget if is_near else most)
    plot = Plot(
        "frontier",
        "Speed against memory",
        f"{counted(len(fits), 'plan')} that fit and {len(failed)} probes that did not.",
        height=300,
        x_end=(budget if is_near else 1.1 * most) / size,
        y_end=1.15 * max(record.speed_of(trial) or 0.0 for trial in fits),
        x_share=_BUDGET_AT if is_near else _BREAK_AT,
    )
    plot.zone(_BUDGET_AT, "beyond")
    plot.axes(f"memory, {unit}", "samples/s")
    edge = sorted((_held(t) / size, record.speed_of(t) or 0.0) for t in record.frontier)
    stairs = [edge[0]]
    for x, y in edge[1:]:
        stairs += [(x, stairs[-1][1]), (x, y)]
    plot.line(stairs, "frontier")
    plot.upright(_BUDGET_AT, "budget")
    arrow = "" if is_near else " \N{RIGHTWARDS ARROW}"
    plot.text(_BUDGET_AT, -10, f"VRAM budget {format_bytes(budget)}{arrow}", "budget-words end")
    _draw_failed(plot, failed, record)
    _draw_plans(plot, fits, size, record)
    return Chart(
        "frontier",
        "Speed against memory",
        "Each point is a plan that ran. The line is the frontier: more speed takes more memory.",
        plot.drawn(),
    )


def _draw_failed(plot: Plot, failed: list[Trial], record: Record) -> None:
    """Draw what did not fit, right of the budget, in columns of three."""
    for at, trial in enumerate(failed[:_MOST_CROSSES]):
        percent = _BUDGET_AT + 3 + 3.5 * (at % 3)
        plot.cross(percent, plot.height - 18 - 16 * (at // 3), "failed", _about(trial, record))
    if failed:
        rows = -(-len(failed[:_MOST_CROSSES]) // 3)
        words = f"{len(failed)} did not fit"
        plot.text(99.5, plot.height - 16 - 16 * rows, words, "failed-words end")


def _draw_plans(plot: Plot, fits: list[Trial], size: int, record: Record) -> None:
    best, baseline = record.best.plan, record.baseline_beside_best.plan
    named = {baseline: ("baseline", "baseline"), best: ("best", "best")}
    if best == baseline:
        named = {best: ("best", "baseline, the best")}
    labels = []
    for trial in sorted(fits, key=lambda each: (each.plan in named, each.plan == best)):
        at = _held(trial) / size, record.speed_of(trial) or 0.0
        kind, name = named.get(trial.plan, ("tried", ""))
        if name:
            low, high = speed_ends(trial, record)
            plot.bar(at[0], low or at[1], high or at[1], f"{kind}-range")
            labels.append((at, name, kind))
        plot.dot(at, kind, _about(trial, record), radius=4.5 if not name else 6.5)
    slowest = min((at[1] for at, _, _ in labels), default=0.0)
    for at, words, kind in labels:
        plot.label(at, words, f"{kind}-words", below=len(labels) > 1 and at[1] == slowest)


def _held(trial: Trial) -> int:
    return trial.measurement.held_bytes or 0


def _about(trial: Trial, record: Record) -> str:
    lines = [f"{describe(trial.plan, record)}", f"trial {trial.number}: {outcome_words(trial)}"]
    if trial.ok:
        lines.append(speed_words(trial, record))
    if trial.measurement.held_bytes is not None:
        lines.append(f"memory {format_bytes(trial.measurement.held_bytes)}")
    return "\n".join(lines)


def memory_charts(record: Record) -> Iterator[Chart]:
    """Yield the memory of the best plan and of the baseline over a step."""
    known = {
        key: record.memory[key]
        for key in _NAMES
        if key in record.memory and "why_not" not in record.memory[key]
    }
    most = max((max(_totals(use)) for use in known.values()), default=0)
    for key, use in known.items():
        trial = record.best if key == "best" else record.baseline_beside_best
        yield Chart(
            f"memory_{key}",
            f"Memory over a step: {_NAMES[key]}",
            _steps_shown(trial, use, record),
            _timeline(key, use, most) + _modules(use),
        )


def why_no_memory(record: Record) -> Iterator[str]:
    """Yield why the memory of a plan is not shown."""
    for key, use in record.memory.items():
        if "why_not" in use:
            yield f"The memory of the {_NAMES.get(key, key)} is not shown: {use['why_not']}"


def legend(kinds: Mapping[str, str]) -> str:
    """Return names with their colours, by the class of these."""
    items = (
        f'<li><i class="swatch {kind}"></i>{escape(name)}</li>' for kind, name in kinds.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _totals(use: Mapping[str, Any]) -> list[int]:
    return list(map(sum, zip(*use["bytes"].values(), strict=True)))


def _steps_shown(trial: Trial, use: Mapping[str, Any], record: Record) -> str:
    steps, how = trial.plan.accumulation_steps, use["how"]
    words = plan_words(trial.plan, record)
    part = f", 2 of {steps} micro-batches" if steps > 2 else ""
    return f"{words}{part}. {'Simulated' if how == 'dry run' else 'Seen in a real step'}."


def _timeline(key: str, use: Mapping[str, Any], most: int) -> str:
    unit, size = scale_for(most)
    moments, peak = len(_totals(use)), max(_totals(use))
    plot = Plot(
        f"memory_{key}",
        f"Memory over a step: {_NAMES[key]}",
        f"Allocated bytes by kind; the peak is {format_bytes(peak)}.",
        height=220,
        x_end=max(moments - 1, 1),
        y_end=1.22 * most / size,
    )
    plot.axes("one optimizer step", f"allocated, {unit}", x_ticks=())
    held = {kind: use["bytes"][kind] for kind in KINDS if any(use["bytes"].get(kind, ()))}
    plot.areas({f"kind-{kind}": [each / size for each in own] for kind, own in held.items()})
    ends = [*(phase["first"] for phase in use["phases"]), moments][1:]
    for phase, end in zip(use["phases"], ends, strict=True):
        place = plot.across(phase["first"])
        plot.upright(place, "phase")
        if end - phase["first"] >= _LEAST_SHARE * moments:
            plot.text(place, 12, phase["name"], "phase-words", dx=6)
    place = plot.across(min(use["peak"], moments - 1))
    plot.level(peak / size, "peak", f"peak {format_bytes(peak)}", place)
    return plot.drawn()


def _modules(use: Mapping[str, Any]) -> str:
    """Return the modules that hold most at the peak, as bars."""
    parts = sorted(use["modules"], key=lambda part: -sum(part["bytes"].values()))[:_MOST_MODULES]
    most = max(sum(part["bytes"].values()) for part in parts) or 1
    rows = []
    for part in parts:
        total = sum(part["bytes"].values())
        count = f" x {part['count']}" if part["count"] > 1 else ""
        name = escape(f"{part['name']} {part['class']}".strip() + count)
        bars = "".join(
            f'<i class="kind-{kind}" style="width:{100 * part["bytes"][kind] / most:.1f}%"></i>'
            for kind in KINDS
            if part["bytes"].get(kind)
        )
        rows.append(
            f'<li><span title="{name}">{name}</span>'
            f"<b>{format_bytes(total)}</b><span>{bars}</span></li>"
        )
    return f'<h3>At the peak, by module</h3><ul class="bars">{"".join(rows)}</ul>'
