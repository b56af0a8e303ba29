"""Two reports compared: the facts that differ, in one table."""

from __future__ import annotations

from autofit.measurement import ACT
from autofit.report.details import Section, environment_rows, figures
from autofit.report.record import Record
from autofit.report.summary import is_sure, plan_words, ratio_words, speed_words
from autofit.units import format_bytes

_ALWAYS = ("plan", "throughput", "memory")


def changes(before: Record, after: Record) -> Section:
    """Return plan, speed and memory of both reports, and all else that differs.

    Above the table stands why the two may not be compared like for like.
    """
    was, now = _facts(before), _facts(after)
    rows = [
        (label, was.get(label, ""), now.get(label, ""))
        for label in {**was, **now}
        if label in _ALWAYS or was.get(label) != now.get(label)
    ]
    speeds = [record.speed_of(record.best) for record in (before, after)]
    if all(speeds):
        ranges = [record.speed_range(record.best) for record in (before, after)]
        ratio = ratio_words((speeds[1] or 0.0) / (speeds[0] or 1.0), *ranges)
        rows.insert(len(_ALWAYS), ("speedup", "", ratio))
    lines = [f"{ACT}The workloads differ"] * ("fingerprint" in [label for label, *_ in rows])
    lines += [
        f"{ACT}The {name} report does not decide which plan is the fastest"
        for name, record in (("earlier", before), ("later", after))
        if not is_sure(record)
    ]
    return Section("Changes", lines, [("", "before", "after"), *rows])


def _facts(record: Record) -> dict[str, str]:
    """Return the facts of a report in words, by label; what each search has anew is left out."""
    best, baseline = record.best, record.baseline_beside_best
    facts = {
        "plan": plan_words(best.plan, record),
        "throughput": speed_words(best, record),
        "memory": format_bytes(best.measurement.held_bytes),
        **{label: figure for label, figure, _ in figures(record)},
        "throughput of the baseline": speed_words(baseline, record),
        "memory of the baseline": format_bytes(baseline.measurement.held_bytes),
        **environment_rows(record),
    }
    return {label: fact for label, fact in facts.items() if label not in ("searched", "duration")}
